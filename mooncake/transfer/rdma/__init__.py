"""Moves bulk bytes by one-sided RDMA over several NICs."""
