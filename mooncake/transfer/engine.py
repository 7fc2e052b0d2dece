"""The transfer port: bulk bytes between registered memory, one-sided. It knows bytes, never
tokens.

Life: `allocate` or `register` memory, give its place to peers, `submit` a batch of READs and
WRITEs against *their* registered memory, `poll` for how batches ended. WRITE is done when the
bytes lie in the peer's memory, READ when they lie in ours. The owner of memory is the one who
refuses: a wrong range, an unknown region, a peer without the cluster secret. A batch ends exactly
once, whole or failed; after its end nothing of it touches memory any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol

import msgspec

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.link_stats import LinkSnapshot


class Op(str, Enum):
    READ = "read"
    WRITE = "write"


class TransferOp(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous copy between a local and a remote region of the batch's peer."""

    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    num_bytes: int


MAX_NOTICE_BYTES = 4096


class TransferBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Copies with one peer, all READ or all WRITE."""

    op: Op
    peer: SegmentRef
    ops: list[TransferOp]
    deadline_s: float | None = None
    """Fail the batch at this time of the driver's clock."""
    notify: bytes | None = None
    """Said to the peer once all bytes have arrived, and before the batch ends: see `Notice`."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender of a batch had to say (`TransferBatch.notify`, at most `MAX_NOTICE_BYTES`):
    an event for the machine whose memory the batch was about.

    It comes once, and only for a batch that ends well: never when a copy failed, or the batch was
    cancelled or too late. Those of one sender come in the order in which their batches were
    submitted; one that is whole waits for those before it. A batch ends well only after its notice
    was taken; once the notice has set out, neither cancel nor deadline end it. Only where a peer
    then falls silent for good can nobody know whether it has heard: the error says "unconfirmed".
    """

    engine_id: str
    """Who says it, as it has proven."""
    payload: bytes


class TransferDone(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch ended: an event for the machine that submitted it."""

    batch_id: int
    error: str | None = None
    """None = every byte has arrived."""
    num_bytes: int = 0
    seconds: float = 0.0


class Region(Protocol):
    """Registered memory of this process."""

    @property
    def region_id(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

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
    """What a role moves KV with. Completions are brought to `handle(TransferDone, now)` by the
    driver.
    """

    @property
    def segment(self) -> SegmentRef:
        """How peers name this process' memory."""

    def allocate(self, num_bytes: int, label: str) -> Region:
        """Return zeroed, registered memory of the kind this engine moves fastest (page aligned)."""

    def register(self, buffer: memoryview, label: str) -> Region:
        """Register memory that exists already; it must stay alive until `unregister`."""

    def unregister(self, region: Region) -> None:
        """Withdraw a region; peers are refused from now on."""

    def submit(self, batch: TransferBatch) -> int:
        """Start a batch and return its id; never blocks. An impossible batch fails through its
        event.
        """

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop; its one `TransferDone` still comes (with an error unless it was
        faster).
        """

    def counters(self) -> Mapping[str, float]:
        """Return what was moved since the start, by name; reported with a worker's load."""


class PolledTransfer(Transfer, Protocol):
    """A transfer engine that a driver's loop reads."""

    def register_device(self, memory: DeviceMemory, label: str) -> Region:
        """Register memory the host cannot address: batches go straight to it where hardware can,
        else by pinned host memory. Raises TransferError.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when a batch ended."""

    def poll(self) -> Sequence[TransferDone]:
        """Return the batches that ended since the last call, without waiting."""

    def take_notices(self) -> Sequence[Notice]:
        """Return what peers have said since the last call, without waiting; the descriptor tells of
        these too. While too many are left here, those of peers are refused and their batches fail.
        """

    def links(self) -> Sequence[LinkSnapshot]:
        """Return what went over each link since the start; from any thread."""

    def close(self) -> None:
        """Refuse peers, end all batches, free the memory."""
