"""Handles HTTP itself: connections, bodies, replies, API keys and their limits, the access log."""
