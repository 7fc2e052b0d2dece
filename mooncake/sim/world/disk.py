"""Simulated disks and buckets: blocks that survive their process, durations of operations, and
faults.

A write that the death of its process cuts off leaves a torn block. In a world with real bytes,
faults damage them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import xxhash

from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import KvLayout
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.storage.disk import (
    NO_SLOT,
    DiskBlock,
    DiskDone,
    DiskScanned,
    FoundBlock,
    Outcome,
)
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import SimRegion
from mooncake.transfer.engine import Region


class SimDiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity, speed and fault rates of simulated disks."""

    bytes_per_s: float = 3e9
    latency_s: float = 100e-6
    scan_s: float = 0.01


class Kept:
    """The content of one slot."""

    def __init__(self, block: DiskBlock, checksum: int, data: bytes | None) -> None:
        self.key = block.key
        self.tenant = block.tenant
        self.checksum = checksum
        self.data = data
        self.whole = False


class SimMedium:
    """The state of one disk, which survives the process that uses it."""

    refused_read = Outcome.FAILED
    """The outcome of a read that is refused."""
    missing = Outcome.CORRUPT
    """The outcome of a read of what is not there."""

    def __init__(self) -> None:
        self.slots: dict[int | BlockKey, Kept] = {}
        """The slots; the one written last comes last."""
        self.refuses_reads = False
        self.refuses_writes = False
        self.is_full = False
        """Whether writes fail because the file system is full."""
        self.num_slots_with_room: int | None = None
        """How many slots the file system has room for; None: all."""
        self.slowdown = 1.0
        """How many times as long every operation takes."""

    def place(self, block: DiskBlock) -> int | BlockKey:
        """Return what the medium keeps a block under: here its slot, in a bucket its key."""
        return block.slot

    def begin(self, block: DiskBlock, kept: Kept) -> None:
        """Store what the medium holds while a block is being written: `kept` may be torn."""
        self.slots.pop(block.slot, None)
        self.slots[block.slot] = kept

    def end(self, block: DiskBlock, kept: Kept) -> None:
        """Take note that a block was written."""

    def found(self, num_slots: int) -> tuple[list[FoundBlock], int]:
        """Return what a scan finds, and how much it drops."""
        newest = {kept.key: slot for slot, kept in self.slots.items()}
        outdated = [slot for slot, kept in self.slots.items() if newest[kept.key] != slot]
        found = [
            FoundBlock(kept.key, slot, kept.tenant, kept.checksum)
            for slot, kept in self.slots.items()
            if isinstance(slot, int) and newest[kept.key] == slot and slot < num_slots
        ]
        dropped = len(self.slots) - len(found)
        for slot in outdated:
            del self.slots[slot]
        return found, dropped

    def damage(self, slot: int | BlockKey) -> None:
        """Flip one bit of the stored block."""
        kept = self.slots[slot]
        kept.whole = False
        if kept.data is not None:
            kept.data = bytes([kept.data[0] ^ 1]) + kept.data[1:]


class SimBucket(SimMedium):
    """A bucket, which any number of nodes may share, each as its last disk. A write replaces an
    object whole or not at all.
    """

    refused_read = Outcome.LATER
    missing = Outcome.ABSENT

    def __init__(self) -> None:
        super().__init__()
        self.late: list[FoundBlock] | None = None
        """What listings show instead of what is there; None: they show what is there."""
        self.num_listings = 0

    def place(self, block: DiskBlock) -> int | BlockKey:
        return block.key

    def begin(self, block: DiskBlock, kept: Kept) -> None:
        pass

    def end(self, block: DiskBlock, kept: Kept) -> None:
        self.slots.pop(block.key, None)
        self.slots[block.key] = kept

    def found(self, num_slots: int) -> tuple[list[FoundBlock], int]:
        self.num_listings += 1
        there = [FoundBlock(k.key, NO_SLOT, k.tenant, None) for k in self.slots.values()]
        return (there if self.late is None else self.late)[-num_slots:], 0


class SimDisks:
    """The `Disks` port of one simulated node, for one life of its process."""

    def __init__(
        self,
        heap: EventHeap,
        config: SimDiskConfig,
        media: list[SimMedium],
        num_slots: list[int],
        layout: KvLayout,
        deliver: Callable[[msgspec.Struct], None],
    ) -> None:
        self._heap = heap
        self._config = config
        self._media = media
        self.num_slots = num_slots
        self._layout = layout
        self._block_bytes = layout.block_bytes
        self._deliver = deliver
        self._arena: SimRegion | None = None
        self._free_s = [0.0] * len(media)
        self._last_op = 0
        self._busy: set[tuple[int, int]] = set()
        self._alive = True

    @property
    def can_hash(self) -> bool:
        return True

    def attach(self, arena: Region) -> None:
        """Scan every disk."""
        assert isinstance(arena, SimRegion)
        self._arena = arena if arena.has_bytes else None
        for disk in range(len(self._media)):
            self.scan(disk)

    def scan(self, disk: int) -> None:
        medium = self._media[disk]
        seconds = medium.slowdown * self._config.scan_s
        self._heap.after(seconds, partial(self._scan, disk))

    def kill(self) -> None:
        """Drop all operations under way, as when the process dies."""
        self._alive = False

    def write(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Start a write. The old content is gone at once, and half of the new block is stored."""
        medium = self._media[disk]
        kept = []
        for block in blocks:
            data = self._bytes(block)
            checksum = block.checksum
            if checksum is None:
                checksum = self._checksum(block.key, data)
            kept.append(Kept(block, checksum, data))
        room = medium.num_slots_with_room
        is_full = room is not None and any(block.slot >= room for block in blocks)
        refused = medium.refuses_writes or medium.is_full or is_full
        if not refused:
            for block, one in zip(blocks, kept, strict=True):
                if one.data is not None:
                    half = len(one.data) // 2
                    one.data = one.data[:half] + bytes(len(one.data) - half)
                medium.begin(block, one)
        outcome = Outcome.FAILED if medium.refuses_writes else Outcome.FULL

        def end() -> tuple[list[Outcome], list[int]]:
            if refused:
                return [outcome] * len(blocks), [0] * len(blocks)
            for block, one in zip(blocks, kept, strict=True):
                data = self._bytes(block)
                if data is not None and one.data is not None:
                    half = len(data) // 2
                    one.data = one.data[:half] + data[half:]
                one.whole = True
                medium.end(block, one)
            return [Outcome.OK] * len(blocks), [one.checksum for one in kept]

        return self._start(disk, blocks, end)

    def read(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Start a read. The memory holds junk until it ends, and after a failure."""
        junk = b"\xee" * self._block_bytes if self._arena is not None else b""
        for block in blocks:
            self._fill(block, junk)
        medium = self._media[disk]

        def end() -> tuple[list[Outcome], list[int]]:
            outcomes = [self._read_one(medium, block) for block in blocks]
            checksums = [
                medium.slots[medium.place(block)].checksum if outcome is Outcome.OK else 0
                for block, outcome in zip(blocks, outcomes, strict=True)
            ]
            return outcomes, checksums

        return self._start(disk, blocks, end)

    def erase(self, disk: int, blocks: list[DiskBlock]) -> int:
        medium = self._media[disk]

        def end() -> tuple[list[Outcome], list[int]]:
            if medium.refuses_writes:
                return [Outcome.FAILED] * len(blocks), [0] * len(blocks)
            for block in blocks:
                medium.slots.pop(medium.place(block), None)
            return [Outcome.OK] * len(blocks), [0] * len(blocks)

        return self._start(disk, blocks, end)

    def checksum(self, offsets: list[int]) -> int:
        """Return the checksum of the block's bytes, or a constant in worlds without bytes."""
        self._last_op += 1
        op_id = self._last_op
        blocks = [DiskBlock(b"", 0, offset) for offset in offsets]

        def end() -> None:
            checksums = [self._checksum(b"", self._bytes(block)) for block in blocks]
            outcomes = [Outcome.OK] * len(blocks)
            self._finish(DiskDone(op_id=op_id, outcomes=outcomes, checksums=checksums))

        self._heap.after(self._config.latency_s, end)
        return op_id

    def _read_one(self, medium: SimMedium, block: DiskBlock) -> Outcome:
        kept = medium.slots.get(medium.place(block))
        if medium.refuses_reads:
            return medium.refused_read
        if kept is None or kept.key != block.key:
            return medium.missing
        if kept.data is None:
            return Outcome.OK if kept.whole else Outcome.CORRUPT
        self._fill(block, kept.data)
        is_right = self._checksum(block.key, kept.data) == kept.checksum
        return Outcome.OK if is_right else Outcome.CORRUPT

    def _start(
        self,
        disk: int,
        blocks: list[DiskBlock],
        end: Callable[[], tuple[list[Outcome], list[int]]],
    ) -> int:
        self._last_op += 1
        op_id = self._last_op
        slots = {(disk, block.slot) for block in blocks if block.slot != NO_SLOT}
        assert self._busy.isdisjoint(slots), "two operations on one slot"
        assert all(NO_SLOT <= block.slot < self.num_slots[disk] for block in blocks)
        self._busy |= slots
        slowdown = self._media[disk].slowdown
        seconds = slowdown * len(blocks) * self._block_bytes / self._config.bytes_per_s
        begin_s = max(self._heap.now(), self._free_s[disk])
        self._free_s[disk] = begin_s + seconds

        def finish() -> None:
            if self._alive:
                self._busy -= slots
                outcomes, checksums = end()
                self._finish(DiskDone(op_id=op_id, outcomes=outcomes, checksums=checksums))

        self._heap.at(self._free_s[disk] + slowdown * self._config.latency_s, finish)
        return op_id

    def _scan(self, disk: int) -> None:
        medium = self._media[disk]
        failed = isinstance(medium, SimBucket) and medium.refuses_reads
        found, dropped = medium.found(self.num_slots[disk]) if not failed else ([], 0)
        self._finish(DiskScanned(disk=disk, found=found, num_dropped=dropped, failed=failed))

    def _finish(self, event: DiskDone | DiskScanned) -> None:
        if self._alive:
            self._deliver(event)

    def _bytes(self, block: DiskBlock) -> bytes | None:
        if self._arena is None:
            return None
        return bytes(self._arena.buffer[block.offset : block.offset + self._block_bytes])

    def _fill(self, block: DiskBlock, data: bytes) -> None:
        if self._arena is not None:
            self._arena.buffer[block.offset : block.offset + self._block_bytes] = data

    def _checksum(self, key: BlockKey, data: bytes | None) -> int:
        """Return the checksum of a block, or in worlds without bytes a stand-in made from
        the key.
        """
        return xxhash.xxh3_64_intdigest(key) if data is None else checksum_of(data, self._layout)
