"""Interfaces of other engines to a shared KVCache, implemented with clients of the pool."""
