"""Declares, reads and resolves settings."""
