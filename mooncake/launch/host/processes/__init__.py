"""Starts and ends processes of this machine, and threads that they cannot do without."""
