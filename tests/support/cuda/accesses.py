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


@dataclass(frozen=True)
class _Past:
    task: Task
    ranges: Ranges
    writes: bool


class Accesses:
    """The accesses of all blocks."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Block, list[_Past]] = weakref.WeakKeyDictionary()
        self._clocks: list[Clock] = []

    def add(self, task: Task, accesses: Iterable[Access]) -> list[str]:
        """Note what a task touched; return its races, in words."""
        races = []
        for access in accesses:
            past = self._of.setdefault(access.block, [])
            for each in past:
                if not (access.writes or each.writes) or _is_before(each.task, task):
                    continue
                if _overlap(access.ranges, each.ranges):
                    races.append(_words(access, each, task))
            if access.writes:  # those that this one covers need not be known any more
                past[:] = [
                    each
                    for each in past
                    if not (_is_before(each.task, task) and _covers(access.ranges, each.ranges))
                ]
            past.append(_Past(task, access.ranges, access.writes))
            if len(past) > _MANY:
                reads = {}
                for each in past:  # of a stream's reads of the same bytes the last says it all
                    key = (each.task.stream, each.writes, tuple(each.ranges))
                    reads[key] = each
                past[:] = list(reads.values())
        return races

    def prune(self, clocks: Sequence[Clock]) -> None:
        for past in self._of.values():
            past[:] = [
                each
                for each in past
                if any(clock.get(each.task.stream, 0) < each.task.tick for clock in clocks)
            ]


def ranges_of(tensor: torch.Tensor, start: int) -> Ranges:
    """Return the bytes of a tensor, counted from address `start`."""
    if not tensor.numel():
        return []
    begin = tensor.data_ptr() - start
    places = _places(tensor.stride(), tuple(tensor.shape), tensor.element_size())
    return [(begin + first, begin + end) for first, end in places]


@functools.lru_cache(4096)
def _places(strides: tuple[int, ...], shape: tuple[int, ...], size: int) -> Ranges:
    """Return the bytes of a tensor, counted from its first one."""
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


def _overlap(a: Ranges, b: Ranges) -> bool:
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] < b[j][1] and b[j][0] < a[i][1]:
            return True
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return False


def _covers(a: Ranges, b: Ranges) -> bool:
    i = 0
    for begin, end in b:
        while i < len(a) and a[i][1] < end:
            i += 1
        if i == len(a) or a[i][0] > begin:
            return False
    return True


def _words(access: Access, past: _Past, task: Task) -> str:
    kinds = ("reads", "writes")
    return (
        f"{task.name} on stream {task.stream} {kinds[access.writes]} {access.block.name}, which "
        f"{past.task.name} on stream {past.task.stream} {kinds[past.writes]}, and neither waits "
        f"for the other.\n{task.name} was queued at:\n  "
        + "\n  ".join(task.stack)
        + f"\n{past.task.name} was queued at:\n  "
        + "\n  ".join(past.task.stack)
    )
