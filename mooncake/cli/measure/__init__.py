"""Commands that measure, check, simulate and plan."""
