"""CUDA kernels in Triton, one op in each file. The same source runs in Triton's CPU interpreter."""
