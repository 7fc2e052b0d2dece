"""The disk port of a pool node: it moves whole blocks between the arena and slots of some disks, by
key. A bucket of an object store is a disk too; it finds blocks by key, and has no slots.

A disk has a byte limit and is cut into slots of one block. Every operation ends later, with exactly
one event that the driver brings to the node. A disk returns a block with the bytes that were
written, or not at all. `disk_files` implements the port with files, `bucket` its part of a bucket,
and `sim.world.disk` all of it with a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec

from mooncake.base import BlockKey, InternalError
from mooncake.transfer.engine import Region

NO_SLOT = -1
"""The slot of a block that a bucket has and this node does not know of."""


class Outcome(str, Enum):
    """The result of an operation for one block."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The slot does not hold what was written: it is torn, damaged, or another block."""
    FULL = "full"
    """The file system has no room, although the byte limit is not reached."""
    FAILED = "failed"
    """The device or file system refused."""
    ABSENT = "absent"
    """The bucket does not hold the block, or not any more."""
    LATER = "later"
    """The bucket did not answer in time, or refused: it may still hold the block."""


class DiskBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block of an operation: arena offset (bytes) on one side, slot on the other."""

    key: BlockKey
    slot: int
    offset: int
    tenant: str = ""
    checksum: int | None = None
    """The checksum of the block if it is known already; it is stored on the disk too."""


class FoundBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that an earlier boot left on a disk. Its bytes are checked when it is read."""

    key: BlockKey
    slot: int
    tenant: str
    checksum: int | None
    """None: only the block itself has it."""


class DiskScanned(msgspec.Struct, frozen=True, kw_only=True):
    """A disk is ready. The event lists what it holds, one block for each key, the one written last
    coming last.
    """

    disk: int
    found: list[FoundBlock]
    num_dropped: int = 0
    """Slots with contents that are torn, damaged, outdated, or of another model."""
    more: bool = False
    """True if another event about the same listing of a bucket follows."""
    failed: bool = False
    """True if a bucket could not be listed as a whole: it may hold more."""


class DiskDone(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an operation, block by block. Nothing of it touches memory any more."""

    op_id: int
    outcomes: list[Outcome]
    checksums: list[int]
    """Checksums of the blocks that are OK; 0 for the others."""
    seconds: float = 0.0


class Disks(Protocol):
    """The disks of one node. A slot may have only one operation under way."""

    @property
    def num_slots(self) -> Sequence[int]:
        """Number of blocks that each disk may hold."""

    @property
    def can_hash(self) -> bool:
        """True if `checksum` works here."""

    def attach(self, arena: Region) -> None:
        """Start: blocks lie in this region. `DiskScanned` follows for each disk; before it the disk
        may not be used.
        """

    def scan(self, disk: int) -> None:
        """List a bucket once more. `DiskScanned` follows, in several pieces if there is much."""

    def write(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Copy blocks from the arena to slots of one disk; return the operation's id."""

    def read(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Copy blocks from slots to the arena, and verify them. The place of a block that is not OK
        may hold any bytes.
        """

    def erase(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Make sure that the next boot finds these slots empty, whatever is lost before."""

    def checksum(self, offsets: list[int]) -> int:
        """Compute the checksums of blocks in the arena; return the operation's id."""


class NoDisks:
    """`Disks` of a node that has none."""

    num_slots: Sequence[int] = ()
    can_hash = False

    def attach(self, arena: Region) -> None:
        """Do nothing: there is nothing to scan."""

    def scan(self, disk: int) -> None:
        raise InternalError(f"no disk {disk} to scan")

    def write(self, disk: int, blocks: list[DiskBlock]) -> int:
        raise InternalError(f"no disk {disk} to write {len(blocks)} blocks to")

    def read(self, disk: int, blocks: list[DiskBlock]) -> int:
        raise InternalError(f"no disk {disk} to read {len(blocks)} blocks from")

    def erase(self, disk: int, blocks: list[DiskBlock]) -> int:
        raise InternalError(f"no disk {disk} to erase {len(blocks)} slots of")

    def checksum(self, offsets: list[int]) -> int:
        raise InternalError(f"nothing here can hash {len(offsets)} blocks")
