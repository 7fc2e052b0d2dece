"""Which blocks were removed from the pool of late: copies of them are not made, and one that a disk
still holds is not let back in. Pure; owned by a node's `Tiering`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from mooncake.base import BlockKey

COPY_S = 30.0
"""A removal reaches the nodes of a pool within this time: another one may hold the block so long,
and offer it.
"""
MAX_REMEMBERED = 65_536
"""Of more, the first is forgotten."""


class RemovalWatcher(Protocol):
    """Who wants to know what becomes of removed blocks on disks."""

    def on_faded(self, key: BlockKey, well: bool) -> None:
        """A trace of a block on a disk is gone, or (not `well`) could not be erased."""

    def on_scanned(self, unwanted: list[BlockKey]) -> None:
        """A disk has told what it holds; these were removed before, and are being erased."""


class Removed:
    """See the module."""

    def __init__(self) -> None:
        self._at_s: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, key: BlockKey, now: float) -> None:
        """A block is removed."""
        self._at_s[key] = now
        self._at_s.move_to_end(key)
        if len(self._at_s) > MAX_REMEMBERED:
            self._at_s.popitem(last=False)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._at_s

    def is_unwanted(self, key: BlockKey, now: float) -> bool:
        """Whether a copy of a block may be one of what is being removed from all nodes now."""
        at_s = self._at_s.get(key)
        return at_s is not None and now < at_s + COPY_S
