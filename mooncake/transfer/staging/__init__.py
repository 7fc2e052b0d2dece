"""Device memory by way of pinned host memory: what no protocol reaches, in pipelined hops."""
