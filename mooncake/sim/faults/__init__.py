"""Faults from a seed, and what must hold under them."""
