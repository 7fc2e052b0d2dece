"""Moves device memory that no protocol reaches by itself, through pinned host memory."""
