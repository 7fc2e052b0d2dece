"""Placement over other people's engines: what is known of each, and which one gets a request."""
