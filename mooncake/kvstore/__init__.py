"""The cluster's KVCache pool: the Conductor's index of blocks, and the kvstore role."""
