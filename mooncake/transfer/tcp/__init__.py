"""Moves bulk bytes over TCP."""
