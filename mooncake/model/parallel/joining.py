"""How ranks find their group. On one machine they use a nameless file, which the first rank makes;
the others inherit it, or get it once they have proven themselves. On several machines they use a
store that the first rank serves.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from mooncake.model.parallel.group import Group, GroupError
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.parallel.torch_group import GLOO, NCCL, TorchGroup


def make_file(backend: str, size: int) -> int:
    """Return the descriptor of a file by which `size` ranks can join one group.

    backend: "gloo" or "nccl"; anything else means shared memory.
    """
    descriptor = os.memfd_create("mooncake-ranks", os.MFD_CLOEXEC)
    if backend not in (GLOO, NCCL):
        try:
            os.ftruncate(descriptor, shared_bytes(size))
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def join(backend: str, size: int, rank: int, descriptor: int, timeout_s: float) -> Group:
    """Return the group of all ranks, seen from `rank`.

    descriptor: of `make_file`'s file, which then belongs to the group. timeout_s: how long the
    others may take to come to an exchange.
    """
    if backend in (GLOO, NCCL):
        group = TorchGroup(backend, rank, size, descriptor, timeout_s)
        weakref.finalize(group, os.close, descriptor)
        return group
    memory = mmap.mmap(descriptor, shared_bytes(size))
    os.close(descriptor)
    return SharedGroup(rank, size, memory, timeout_s)


class FarStore:
    """The store by which ranks of several machines find each other. It asks for no proof, so any
    process that reaches its port can keep ranks from meeting.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        """`address`: (host, port) of the lead's `ServedStore`."""
        self.address = address

    def join(self, backend: str, size: int, rank: int, host: str, timeout_s: float) -> Group:
        """Return the group of all ranks, seen from `rank`. Raises GroupError when the lead does not
        answer.

        backend: "gloo" or "nccl". host: where gloo listens; NCCL takes the interface that its own
        environment names. timeout_s: how long the others may take to come to an exchange.
        """
        try:
            store = self._open(timeout_s)
        except RuntimeError as error:
            raise GroupError(f"the lead's store at {self.address} does not answer") from error
        return TorchGroup(backend, rank, size, store, timeout_s, host=host)

    def _open(self, timeout_s: float) -> Store:
        return TCPStore(*self.address, is_master=False, timeout=timedelta(seconds=timeout_s))


class ServedStore(FarStore):
    """The same store in the lead's process, which serves it as long as its group is used."""

    def __init__(self, host: str) -> None:
        """Listen at a port of `host`, and at no other address."""
        listener = socket.create_server((host, 0))
        super().__init__((host, listener.getsockname()[1]))
        self._store = TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _open(self, timeout_s: float) -> Store:
        del timeout_s  # the group sets it
        return self._store
