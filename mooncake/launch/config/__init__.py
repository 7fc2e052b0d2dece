"""Settings: where they are declared, read, resolved."""
