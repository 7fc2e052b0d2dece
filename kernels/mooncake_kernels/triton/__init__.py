"""CUDA kernels in Triton, one op a file; the same source runs in Triton's CPU interpreter."""
