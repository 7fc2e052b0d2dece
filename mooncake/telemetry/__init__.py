"""Lifetime events, and the metrics, recent status and logs that are derived from them."""
