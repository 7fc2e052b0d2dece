"""Commands that make credentials and certificates."""
