"""How the ranks of an instance find their group: by one nameless file, which the lead makes and its
followers inherit. Nothing listens for who wants to join.
"""

from __future__ import annotations

import mmap
import os
import weakref

from mooncake.base import Shape
from mooncake.model.options import GLOO, ModelOptions
from mooncake.model.parallel.group import Group
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.parallel.torch_group import TorchGroup


def make_file(options: ModelOptions) -> int:
    """Return the descriptor of a file by which the ranks of one instance can join one group."""
    descriptor = os.memfd_create("mooncake-ranks", os.MFD_CLOEXEC)
    if options.rank_backend != GLOO:
        try:
            os.ftruncate(descriptor, _bytes(options.shape))
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def join(options: ModelOptions, rank: int, descriptor: int, timeout_s: float) -> Group:
    """Return the group of all ranks, seen from `rank`.

    descriptor: of `make_file`'s file, which is the group's from now on. timeout_s: how long the
    others may take to come to an exchange.
    """
    size = options.shape.tp
    if options.rank_backend == GLOO:
        group = TorchGroup(GLOO, rank, size, descriptor, timeout_s)
        weakref.finalize(group, os.close, descriptor)
        return group
    memory = mmap.mmap(descriptor, _bytes(options.shape))
    os.close(descriptor)
    return SharedGroup(rank, size, memory, timeout_s)


def _bytes(shape: Shape) -> int:
    return shared_bytes(shape.tp, shape.dcp)
