"""Blocks taken out of one node for good: who asked for it waits to hear that no boot of the node
will find them again.

Pure; owned by the node. Readers in mid-read keep their bytes; the disks' part takes its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.replicate import Replicator
from mooncake.kvstore.tiering import Tiering

Done = Callable[[list[bool], list[bool]], None]
"""(of each block whether it was here and is gone for good, whether it is left)"""


class _Wait:
    """One question, until nothing of its blocks fades any more."""

    __slots__ = ("done", "fading", "keys", "left", "was_here")

    def __init__(self, keys: Sequence[BlockKey], done: Done) -> None:
        self.keys = keys
        self.done = done
        self.was_here: set[BlockKey] = set()
        self.left: set[BlockKey] = set()
        self.fading: set[BlockKey] = set()


class Removals:
    """All removals of one node. A hard pin protects a block: it is left."""

    def __init__(
        self,
        tiers: tuple[DramTier, Tiering],
        replicator: Replicator,
        gone: Callable[[list[BlockKey]], None],
        counters: Counter[str],
    ) -> None:
        """`gone` is told of blocks taken out of DRAM."""
        self._dram, self._tiering = tiers
        self._replicator = replicator
        self._gone = gone
        self._counters = counters
        self._waits: list[_Wait] = []
        self._tiering.watcher = self

    def begin(self, keys: Sequence[BlockKey], now: float, done: Done) -> None:
        """Have nobody find these blocks from now on; `done` is called once no boot of this node
        will find them either, which may be before this returns.
        """
        wait = _Wait(keys, done)
        for key in dict.fromkeys(keys):
            if self._dram.is_kept(key):
                wait.left.add(key)
                continue
            self._tiering.removed.add(key, now)
            self._replicator.forget(key)
            if self._dram.condemn(key):
                wait.was_here.add(key)
                self._gone([key])
            if self._tiering.remove(key):
                wait.was_here.add(key)
            if self._tiering.is_fading(key):
                wait.fading.add(key)
            if self._tiering.may_come_back(key):
                wait.left.add(key)
        self._waits.append(wait)
        self._settle()

    def on_faded(self, key: BlockKey, well: bool) -> None:
        """See `RemovalWatcher`."""
        for wait in self._waits:
            if key in wait.fading:
                if not well or self._tiering.may_come_back(key):
                    wait.left.add(key)
                if not self._tiering.is_fading(key):
                    wait.fading.discard(key)
        self._settle()

    def on_scanned(self, unwanted: list[BlockKey]) -> None:
        """See `RemovalWatcher`."""
        for wait in self._waits:
            found = set(unwanted).intersection(wait.keys)
            wait.was_here |= found
            wait.fading |= found
        self._settle()

    def _settle(self) -> None:
        """Answer those who wait for nothing more. A disk that is not scanned may hold any block."""
        if self._tiering.num_unscanned:
            return
        over = [wait for wait in self._waits if not wait.fading]
        self._waits = [wait for wait in self._waits if wait.fading]
        for wait in over:
            gone = wait.was_here - wait.left
            self._counters["blocks_removed"] += len(gone)
            wait.done([key in gone for key in wait.keys], [key in wait.left for key in wait.keys])

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody waits for what does not come."""
        for wait in self._waits:
            assert wait.fading or self._tiering.num_unscanned, "nothing is waited for"
            assert all(map(self._tiering.is_fading, wait.fading))
