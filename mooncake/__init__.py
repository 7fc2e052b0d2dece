"""Mooncake: a disaggregated serving engine for Kimi-K2. See ARCHITECTURE.md for the floors."""

__version__ = "0.1.0"
