"""Kernels of Mooncake; see the modules. This package imports nothing on purpose."""
