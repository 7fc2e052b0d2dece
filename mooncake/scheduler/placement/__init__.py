"""Placement: the Conductor, the choices it makes, and what it knows of workers."""
