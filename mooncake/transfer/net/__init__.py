"""Holds what all protocols share: the I/O loop, proven sessions, directories of peers, retries."""
