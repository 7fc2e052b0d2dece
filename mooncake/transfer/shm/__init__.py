"""Moves bulk bytes between processes of one host, by shared memory."""
