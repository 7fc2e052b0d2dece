"""Kernels of Mooncake; see the modules, nothing is imported here on purpose."""
