"""Keeps what remains of blocks that were given up: their keys, and copies on disks that are not
erased yet. A removed block is not copied again, and a copy on a disk is not used again.

Pure; owned by a node's `Tiering`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mooncake.base import BlockKey, WorkerRef
from mooncake.base.bounded_map import SharedMap
from mooncake.base.rights import client_key

COPY_S = 30.0
"""A removal reaches all nodes of a pool within this time; until then another node may still hold
the block, and offer it.
"""
MAX_REMEMBERED = 65_536
"""Keys of removed blocks that are remembered. When there are more, the oldest of the client
credential that has removed most is forgotten.
"""


class Tombstones:
    """Remembers the keys of the blocks that were removed from the pool most recently."""

    def __init__(self) -> None:
        self._removed_at_s: SharedMap[BlockKey, float] = SharedMap(MAX_REMEMBERED)

    def add(self, key: BlockKey, asker: WorkerRef, now: float) -> None:
        """Remember that `asker` removed a block at `now` (seconds)."""
        self._removed_at_s.put(client_key(asker), key, now)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._removed_at_s

    def is_since(self, key: BlockKey, at_s: float) -> bool:
        """Return whether a block was removed at `at_s` or later."""
        removed_at_s = self._removed_at_s.get(key)
        return removed_at_s is not None and removed_at_s >= at_s

    def is_fresh(self, key: BlockKey, now: float) -> bool:
        """Return whether other nodes may not have heard of a block's removal yet."""
        removed_at_s = self._removed_at_s.get(key)
        return removed_at_s is not None and now < removed_at_s + COPY_S


class DiskTraces:
    """Remembers the copies on disks of blocks that the node does not store any more."""

    def __init__(self) -> None:
        self._going: Counter[BlockKey] = Counter()
        self._stuck: set[BlockKey] = set()

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Count one trace of each block, which a disk is about to erase or overwrite."""
        self._going.update(keys)

    def end(self, key: BlockKey, *, well: bool) -> None:
        """Remove one trace from the count. If the disk did not do it `well`, the block stays
        stuck.
        """
        self._going[key] -= 1
        if not self._going[key]:
            del self._going[key]
        if not well:
            self._stuck.add(key)

    def add_stuck(self, key: BlockKey) -> None:
        """Note a block that a refused write may have left on a disk."""
        self._stuck.add(key)

    def end_stuck(self, key: BlockKey) -> None:
        """Note that no trace is left of a block that was stuck."""
        self._stuck.discard(key)

    def is_going(self, key: BlockKey) -> bool:
        """Return whether some disk has yet to erase or overwrite a trace of the block."""
        return key in self._going

    def is_stuck(self, key: BlockKey) -> bool:
        """Return whether the next boot may find the block although nothing erases it any more."""
        return key in self._stuck

    def going(self) -> Counter[BlockKey]:
        """Return the traces that are about to go, by block (for checks)."""
        return self._going.copy()
