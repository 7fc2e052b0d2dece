"""The kvstore role: one node of the pool, which grants, pins, copies and removes blocks."""
