"""How ranks find their group: by one nameless file, which the first makes and the others inherit,
or are given once they have proven themselves.
"""

from __future__ import annotations

import mmap
import os
import weakref

from mooncake.model.parallel.group import Group
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.parallel.torch_group import GLOO, NCCL, TorchGroup


def make_file(backend: str, size: int) -> int:
    """Return the descriptor of a file by which `size` ranks can join one group.

    backend: "gloo" or "nccl", or one memory.
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

    descriptor: of `make_file`'s file, which is the group's from now on. timeout_s: how long the
    others may take to come to an exchange.
    """
    if backend in (GLOO, NCCL):
        group = TorchGroup(backend, rank, size, descriptor, timeout_s)
        weakref.finalize(group, os.close, descriptor)
        return group
    memory = mmap.mmap(descriptor, shared_bytes(size))
    os.close(descriptor)
    return SharedGroup(rank, size, memory, timeout_s)
