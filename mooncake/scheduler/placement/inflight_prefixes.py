"""Prefixes that are being computed now: similar requests in a burst find them before the first
block event comes.

Pure; owned by the Conductor. A tree of stretches that chains have in common: a prompt of thousands
of blocks takes a few nodes, not thousands of entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base import BlockKey


class _Stretch:
    """The keys [start, stop) of a chain, shared by all chains through this node."""

    __slots__ = ("children", "counts", "keys", "start", "stop", "total")

    def __init__(self, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        self.keys = keys
        """The keys of one whole chain through this node; up to `stop` all chains are equal."""
        self.start = start
        self.stop = stop
        self.counts: dict[str, int] = {}
        """Worker id -> how many of its chains reach `stop`."""
        self.total = 0
        """The sum of `counts`."""
        self.children: dict[BlockKey, _Stretch] = {}
        """Children by their first key."""

    def common(self, keys: Sequence[BlockKey]) -> int:
        """Return the position at which `keys`, which enter this stretch, leave it. Keys are
        chained, so equal keys mean that all keys before them are equal too.
        """
        low, high = self.start + 1, min(self.stop, len(keys))
        if self.keys[high - 1] == keys[high - 1]:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.keys[middle - 1] == keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def count(self, worker_id: str, number: int) -> None:
        left = self.counts.get(worker_id, 0) + number
        if left:
            self.counts[worker_id] = left
        else:
            del self.counts[worker_id]
        self.total += number

    def split(self, at: int) -> None:
        """Become [start, at), with the rest as the only child."""
        rest = _Stretch(self.keys, at, self.stop)
        rest.counts, rest.total, rest.children = dict(self.counts), self.total, self.children
        self.stop = at
        self.children = {rest.keys[at]: rest}

    def merge_only_child(self) -> None:
        """Undo a split that is not needed any more: all chains go on into the only child."""
        if len(self.children) != 1:
            return
        (child,) = self.children.values()
        if child.total == self.total:
            self.keys, self.stop, self.children = child.keys, child.stop, child.children


class InflightPrefixes:
    """Knows which worker is computing which prefix. A key implies all keys before it."""

    def __init__(self) -> None:
        self._roots: dict[BlockKey, _Stretch] = {}

    def __len__(self) -> int:
        """Return how many nodes the tree has; slow (for checks)."""
        count, todo = 0, list(self._roots.values())
        while todo:
            stretch = todo.pop()
            count += 1
            todo.extend(stretch.children.values())
        return count

    @property
    def empty(self) -> bool:
        """True if no prefix is being computed."""
        return not self._roots

    def add(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Record that a worker computes the blocks `keys`, from the first of a prompt. The caller
        must not change `keys` afterwards.
        """
        children, at = self._roots, 0
        while at < len(keys):
            stretch = children.get(keys[at])
            if stretch is None:
                stretch = children[keys[at]] = _Stretch(keys, at, len(keys))
            else:
                end = stretch.common(keys)
                if end < stretch.stop:
                    stretch.split(end)
            stretch.count(worker_id, 1)
            children, at = stretch.children, stretch.stop

    def remove(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Undo one `add`."""
        children, at, path = self._roots, 0, list[_Stretch]()
        while at < len(keys):
            stretch = children[keys[at]]
            stretch.count(worker_id, -1)
            first, at = keys[at], stretch.stop
            if not stretch.total:
                del children[first]
                break
            path.append(stretch)
            children = stretch.children
        for stretch in reversed(path):
            stretch.merge_only_child()

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it is computing, if any."""
        found: dict[str, int] = {}
        children, at = self._roots, 0
        while at < len(keys):
            stretch = children.get(keys[at])
            if stretch is None:
                break
            end = stretch.common(keys)
            for worker_id in stretch.counts:
                found[worker_id] = end
            if end < stretch.stop:
                break
            children, at = stretch.children, end
        return found
