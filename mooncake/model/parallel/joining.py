"""How the ranks of an instance find their group: by one nameless file, which the lead makes and its
followers inherit. Nothing listens for who wants to join.
"""

from __future__ import annotations

import mmap
import os
import weakref

from mooncake.base import Shape
from mooncake.model.parallel.group import Group
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.parallel.torch_group import GLOO, TorchGroup


def make_file(backend: str, shape: Shape) -> int:
    """Return the descriptor of a file by which the ranks of one instance can join one group.

    backend: "gloo", or one memory.
    """
    descriptor = os.memfd_create("mooncake-ranks", os.MFD_CLOEXEC)
    if backend != GLOO:
        try:
            os.ftruncate(descriptor, shared_bytes(shape.num_ranks))
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def join(backend: str, shape: Shape, rank: int, descriptor: int, timeout_s: float) -> Group:
    """Return the group of all ranks, seen from `rank`.

    descriptor: of `make_file`'s file, which is the group's from now on. timeout_s: how long the
    others may take to come to an exchange.
    """
    if backend == GLOO:
        group = TorchGroup(GLOO, rank, shape.num_ranks, descriptor, timeout_s)
        weakref.finalize(group, os.close, descriptor)
        return group
    memory = mmap.mmap(descriptor, shared_bytes(shape.num_ranks))
    os.close(descriptor)
    return SharedGroup(rank, shape.num_ranks, memory, timeout_s)
