"""Who touched which bytes of a block last, and whether the next one is ordered behind them.

Two tasks race where both touch the same bytes, one of them writes, and no wait orders them: found
in whatever order they ran.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.support.cuda.memory import Block
    from tests.support.cuda.streams import Clock, Task

Ranges = list[tuple[int, int]]
_MOST_RANGES = 4096
_MANY = 256


@dataclass(frozen=True)
class Access:
    """Bytes of a block that a task reads or writes."""

    block: Block
    ranges: Ranges
    """(begin, end), sorted."""
    writes: bool
    at: int = 0
    """From where in the block ranges are counted."""

    def overlaps(self, other: Access) -> bool:
        """Whether both touch some byte, of one block."""
        i = j = 0
        further = other.at - self.at
        while i < len(self.ranges) and j < len(other.ranges):
            (begin, end), (first, last) = self.ranges[i], other.ranges[j]
            if begin < last + further and first + further < end:
                return True
            if end <= last + further:
                i += 1
            else:
                j += 1
        return False

    def covers(self, other: Access) -> bool:
        """Whether this one touches all bytes that the other does."""
        i, further = 0, other.at - self.at
        for begin, end in other.ranges:
            while i < len(self.ranges) and self.ranges[i][1] < end + further:
                i += 1
            if i == len(self.ranges) or self.ranges[i][0] > begin + further:
                return False
        return True


class Accesses:
    """The accesses of all blocks."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Block, list[tuple[Task, Access]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, task: Task, accesses: Iterable[Access]) -> list[str]:
        """Note what a task touched; return its races, in words."""
        races = []
        for access in accesses:
            past = self._of.setdefault(access.block, [])
            for before, other in past:
                if not (access.writes or other.writes) or _is_before(before, task):
                    continue
                if access.overlaps(other):
                    races.append(_words(access, other, before, task))
            if access.writes:  # those that this one covers need not be known any more
                past[:] = [
                    (before, other)
                    for before, other in past
                    if not (_is_before(before, task) and access.covers(other))
                ]
            past.append((task, access))
            if len(past) > _MANY:
                reads = {}
                for before, other in past:  # a stream's last read of the same bytes says it all
                    key = (before.stream, other.writes, other.at, tuple(other.ranges))
                    reads[key] = before, other
                past[:] = list(reads.values())
        return races

    def prune(self, clocks: Sequence[Clock]) -> None:
        for past in self._of.values():
            past[:] = [
                (before, other)
                for before, other in past
                if any(clock.get(before.stream, 0) < before.tick for clock in clocks)
            ]


def ranges_of(tensor: torch.Tensor) -> Ranges:
    """Return the bytes of a tensor, counted from its first one."""
    return _places(tensor.stride(), tensor.shape, tensor.itemsize) if tensor.numel() else []


@functools.lru_cache(4096)
def _places(strides: tuple[int, ...], shape: tuple[int, ...], size: int) -> Ranges:
    dims = sorted(
        (stride, count)
        for stride, count in zip(strides, shape, strict=True)
        if count > 1 and stride
    )
    length = 1
    while dims and dims[0][0] <= length:
        stride, count = dims.pop(0)
        length += stride * (count - 1)
    pieces = 1
    for _, count in dims:
        pieces *= count
    if pieces > _MOST_RANGES:
        return [(0, (length + sum(s * (n - 1) for s, n in dims)) * size)]
    offsets = [0]
    for stride, count in reversed(dims):
        offsets = [at + stride * number for at in offsets for number in range(count)]
    return merged((at * size, (at + length) * size) for at in offsets)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges sorted, those that touch as one."""
    out: Ranges = []
    for begin, end in sorted(ranges):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _is_before(task: Task, other: Task) -> bool:
    return other.clock.get(task.stream, 0) >= task.tick


def _words(access: Access, other: Access, before: Task, task: Task) -> str:
    kinds = ("reads", "writes")
    return (
        f"{task.name} on stream {task.stream} {kinds[access.writes]} {access.block.name}, which "
        f"{before.name} on stream {before.stream} {kinds[other.writes]}, and neither waits "
        f"for the other.\n{task.name} was queued at:\n  {task.place}"
        f"\n{before.name} was queued at:\n  {before.place}"
    )
