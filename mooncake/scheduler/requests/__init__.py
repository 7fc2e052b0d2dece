"""Requests of one gateway, each from its permit to its one final event."""
