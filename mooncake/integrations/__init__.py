"""Other engines' interfaces to a shared KVCache, implemented by clients of the pool."""
