"""Keeps what remains of blocks that were removed from the pool: their keys, so that they are not
copied again. Pure; owned by a node's `Tiering`.
"""

from __future__ import annotations

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
