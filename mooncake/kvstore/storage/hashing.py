"""Computes checksums of blocks in DRAM: once a block is complete, and again when it is suspected.

Pure; owned by the node. The bytes are hashed by the `Disks` adapter beside the node's work; a
reader that comes before its block's checksum is known simply gets none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.storage.disk import DiskDone, Disks
from mooncake.kvstore.storage.dram import DramTier

MAX_OP_BYTES = 16 << 20
"""Bytes hashed by one operation: about a millisecond."""


class Hashing:
    """Computes and compares checksums, one operation at a time. Blocks are held meanwhile."""

    def __init__(
        self, dram: DramTier, disks: Disks | None, damaged: Callable[[BlockKey], None]
    ) -> None:
        """Call `damaged` with each block whose bytes have changed. Without `disks` nothing is
        hashed.
        """
        self._dram = dram
        self._disks = disks
        self._damaged = damaged
        self._queue: dict[BlockKey, None] = {}
        """Blocks in DRAM in the order in which they came, and some that have left it since: never
        more than twice as many as DRAM holds.
        """
        self._op_blocks = max(1, MAX_OP_BYTES // dram.block_bytes)
        self._op_id: int | None = None
        self._keys: list[BlockKey] = []

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Hash blocks that have become complete, unless their checksums are known."""
        if self._disks is not None:
            self._add(key for key in keys if self._dram.block(key).checksum is None)

    def suspect(self, keys: Iterable[BlockKey]) -> None:
        """Hash blocks again that reached a reader damaged, to tell whether the wire or the memory
        is at fault.
        """
        if self._disks is not None:
            self._add(key for key in keys if self._dram.has(key))

    def _add(self, keys: Iterable[BlockKey]) -> None:
        self._queue.update(dict.fromkeys(keys))
        if len(self._queue) > 2 * self._dram.num_blocks:
            self._queue = {key: None for key in self._queue if self._dram.has(key)}

    def start(self) -> None:
        """Begin with the blocks that wait, unless an operation is under way."""
        if self._disks is None or self._op_id is not None:
            return
        keys: dict[BlockKey, None] = {}
        while self._queue and len(keys) < self._op_blocks:
            key = next(iter(self._queue))
            del self._queue[key]
            if self._dram.has(key):
                keys[key] = None
        if keys:
            self._keys = list(keys)
            self._dram.pin(self._keys)
            self._op_id = self._disks.checksum(self._dram.offsets(self._keys))

    def on_done(self, event: DiskDone) -> bool:
        """Record the checksums found. Return False when the operation is not one of these."""
        if event.op_id != self._op_id:
            return False
        keys, self._keys, self._op_id = self._keys, [], None
        self._dram.unpin(keys)
        for key, checksum in zip(keys, event.checksums, strict=True):
            if not self._dram.has(key):  # the block was removed meanwhile
                continue
            known = self._dram.block(key).checksum
            if known is None:
                self._dram.learn_checksum(key, checksum)
            elif known != checksum:
                self._damaged(key)
        return True

    @property
    def quiet(self) -> bool:
        """True if nothing waits or is under way."""
        return self._op_id is None and not self._queue

    def pins(self) -> Counter[BlockKey]:
        """Return the blocks pinned in DRAM meanwhile (for checks)."""
        return Counter(self._keys)

    def known(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the checksums of stored blocks, 0 where unknown; none when all are unknown."""
        checksums = [self._dram.block(key).checksum or 0 for key in keys]
        return checksums if any(checksums) else []
