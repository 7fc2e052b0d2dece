"""Prefixes that are being computed right now: a burst of siblings finds them before the first
block event does.

Pure; owned by the Conductor. One entry a key, with the workers that will hold it soon.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base import BlockKey


class InflightPrefixes:
    """Which worker is computing which prefix. Keys are chained, so holding a key means holding all
    keys before it.
    """

    def __init__(self) -> None:
        self._workers: dict[BlockKey, dict[str, int]] = {}

    @property
    def num_keys(self) -> int:
        return len(self._workers)

    def add(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """`worker_id` has been asked to compute the blocks `keys`, from the first of a prompt."""
        for key in keys:
            counts = self._workers.setdefault(key, {})
            counts[worker_id] = counts.get(worker_id, 0) + 1

    def remove(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Take one `add` back."""
        for key in keys:
            counts = self._workers[key]
            counts[worker_id] -= 1
            if not counts[worker_id]:
                del counts[worker_id]
                if not counts:
                    del self._workers[key]

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it is computing (workers with none left
        out).
        """
        if not keys:
            return {}
        return {
            worker_id: self._length(worker_id, keys) for worker_id in self._workers.get(keys[0], {})
        }

    def _length(self, worker_id: str, keys: Sequence[BlockKey]) -> int:
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if worker_id in self._workers.get(keys[middle - 1], {}):
                low = middle
            else:
                high = middle - 1
        return low
