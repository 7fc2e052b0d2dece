"""The transfer port: one-sided copies between registered memory. It knows bytes, never tokens.

`allocate` or `register` memory, give its place to peers, `submit` batches of READs or WRITEs
against *their* registered memory, and `poll` for how the batches ended. A WRITE is done when the
bytes lie in the peer's memory, a READ when they lie in ours. The owner of the memory refuses wrong
ranges, unknown regions and peers without the cluster secret. A batch ends exactly once, whole or
failed; after its end nothing touches memory for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol

import msgspec

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkSnapshot


class Op(str, Enum):
    """Which way a batch goes, seen from the engine that submits it."""

    READ = "read"
    WRITE = "write"


class TransferOp(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous copy between a local and a remote region of the batch's peer."""

    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    num_bytes: int


class TransferBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Copies with one peer, all READ or all WRITE."""

    op: Op
    peer: SegmentRef
    ops: list[TransferOp]
    deadline_s: float | None = None
    """Fail the batch at this time of the driver's clock."""
    grant: int = 0
    """WRITE: the number by which the owner lets us write, if it guards the memory."""


class TransferDone(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch ended: an event for the machine that submitted it."""

    batch_id: int
    error: str | None = None
    """None = every byte has arrived."""
    num_bytes: int = 0
    seconds: float = 0.0
    protocol: str = ""
    """What moved it: "shm", "rdma", "tcp", "inproc", or "stage" where it went through slots of host
    memory; empty: not known.
    """


class Pieces(msgspec.Struct, frozen=True):
    """Pieces of one region, all of one size and at multiples of it."""

    offsets: Sequence[int]
    num_bytes: int


class Region(Protocol):
    """Registered memory of this process."""

    @property
    def region_id(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def fd(self) -> int | None:
        """The descriptor of memory that other processes can map; None: they cannot."""

    @property
    def device(self) -> str:
        """Where it lies: "host", or a device such as "cuda:0"."""

    @property
    def buffer(self) -> memoryview:
        """The memory itself, writable, format "B". ValueError: the host cannot address it."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterable[memoryview]:
        """Return the bytes of (offset, length) ranges, in pieces: for checking, not for moving.

        Waits for a device, some 0.1 ms a MiB. Raises TransferError when the device fails.
        """


class Transfer(Protocol):
    """Moves KV for a role. The driver brings each `TransferDone` to the role's `handle`."""

    @property
    def segment(self) -> SegmentRef:
        """The name by which peers reach this process' memory."""

    def allocate(self, num_bytes: int, label: str) -> Region:
        """Return zeroed, registered memory of the kind this engine moves fastest (page aligned)."""

    def register(self, buffer: memoryview, label: str) -> Region:
        """Register memory that exists already; it must stay alive until `unregister`."""

    def unregister(self, region: Region) -> None:
        """Withdraw a region; peers are refused from now on."""

    def lend(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        """Let a pool client, whose credential has the channel key `holder`, touch pieces of memory.
        Others of its kind, and this one elsewhere, are refused; workers are not.
        """

    def take_back(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        """End a loan: on return the client touches no piece that it was not lent again."""

    def guard(self, region: Region) -> None:
        """Let peers write to a region only by a grant that was not revoked."""

    def grant(self) -> int:
        """Return the number of a new grant, for one writer. Raises TransferError when too many are
        open.
        """

    def revoke(self, grant: int) -> None:
        """Refuse what is written by a grant from now on; it may be one that was issued elsewhere.
        What was begun before may still land: see `fence`.
        """

    def fence(self, grant: int) -> Fence:
        """Return whether something may still be written by a revoked grant. To be asked no sooner
        than `resting.FIRST_LOOK_S` after `revoke`; waits for copies in hand of at most 4 MiB.
        """

    def submit(self, batch: TransferBatch) -> int:
        """Start a batch and return its id; never blocks. An impossible batch fails through its
        event.
        """

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop. Its `TransferDone` still comes, well if it was faster."""

    def counters(self) -> Mapping[str, float]:
        """Return sums since the start, by name; reported with a worker's load."""


class PolledTransfer(Transfer, Protocol):
    """A transfer engine that a driver's loop polls."""

    def register_device(self, memory: DeviceMemory, label: str) -> Region:
        """Register memory the host cannot address: batches go straight to it where hardware can,
        else by pinned host memory. Raises TransferError.
        """

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a batch ended."""

    def poll(self) -> Sequence[TransferDone]:
        """Return the batches that ended since the last call, without waiting."""

    def links(self) -> Sequence[LinkSnapshot]:
        """Return the counters of each link since the start; from any thread."""

    def close(self) -> None:
        """Refuse peers, end all batches, free the memory."""
