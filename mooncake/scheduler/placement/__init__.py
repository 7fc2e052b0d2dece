"""Placement: the Conductor, the choices that it makes, and what it knows about workers."""
