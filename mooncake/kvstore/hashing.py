"""Checksums of blocks in DRAM: taken once a block is whole, kept with it, taken again on suspicion.

Pure; owned by the node. The bytes are hashed by the `Disks` adapter beside the node's work; a
reader that comes before its block's checksum is known simply gets none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.disk import DiskDone, Disks
from mooncake.kvstore.dram import DramTier

MAX_OP_BYTES = 16 << 20
"""Hashed by one operation: about a millisecond."""


class Hashing:
    """Takes and compares checksums, one operation at a time; blocks are held meanwhile."""

    def __init__(
        self, dram: DramTier, disks: Disks | None, damaged: Callable[[BlockKey], None]
    ) -> None:
        """Nothing is hashed without `disks`; `damaged` is told of blocks that are not any more
        what they were.
        """
        self._dram = dram
        self._disks = disks
        self._damaged = damaged
        self._queue: deque[BlockKey] = deque()
        self._op_blocks = max(1, MAX_OP_BYTES // dram.block_bytes)
        self._op_id: int | None = None
        self._keys: list[BlockKey] = []

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """These blocks have become whole."""
        if self._disks is not None:
            self._queue.extend(key for key in keys if self._dram.checksum(key) is None)

    def suspect(self, keys: Iterable[BlockKey]) -> None:
        """A reader got something else than was promised: was it the wire, or is it the memory?"""
        if self._disks is not None:
            self._queue.extend(key for key in keys if self._dram.has(key))

    def start(self) -> None:
        """Begin with what waits, unless something is under way."""
        if self._disks is None or self._op_id is not None:
            return
        keys: dict[BlockKey, None] = {}
        while self._queue and len(keys) < self._op_blocks:
            key = self._queue.popleft()
            if self._dram.has(key):
                keys[key] = None
        if keys:
            self._keys = list(keys)
            self._dram.hold(self._keys)
            self._op_id = self._disks.checksum(self._dram.offsets(self._keys))

    def on_done(self, event: DiskDone) -> bool:
        """Keep what was found; False when the event is about something else."""
        if event.op_id != self._op_id:
            return False
        keys, self._keys, self._op_id = self._keys, [], None
        self._dram.unpin(keys)
        for key, checksum in zip(keys, event.checksums, strict=True):
            if not self._dram.has(key):  # it was removed meanwhile
                continue
            known = self._dram.checksum(key)
            if known is None:
                self._dram.learn_checksum(key, checksum)
            elif known != checksum:
                self._damaged(key)
        return True

    @property
    def quiet(self) -> bool:
        """Nothing waits or is under way."""
        return self._op_id is None and not self._queue

    def held(self) -> Counter[BlockKey]:
        """Return what is held in DRAM meanwhile (for checks)."""
        return Counter(self._keys)

    def known(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the checksums of stored blocks, 0 where unknown; none when all are unknown."""
        checksums = [self._dram.checksum(key) or 0 for key in keys]
        return checksums if any(checksums) else []
