"""Moves bulk bytes between registered memory of engines, by RDMA, TCP or shared memory."""
