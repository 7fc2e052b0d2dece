"""Moves bulk bytes inside one process."""
