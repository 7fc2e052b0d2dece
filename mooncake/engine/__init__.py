"""Continuous batching of one instance: sequences, step plans, pages and the prefix cache."""
