"""Faults drawn from a seed, and what must hold under them."""
