"""The transfer port: one-sided copies between registered memory. It knows bytes, never tokens.

`allocate` or `register` memory, give its place to peers, `submit` batches of READs or WRITEs
against *their* registered memory, and `poll` for how the batches ended. A WRITE is done when the
bytes lie in the peer's memory, a READ when they lie in ours. The owner of the memory refuses wrong
ranges, unknown regions and peers without the cluster secret. A batch ends exactly once: all of it
is done, or it failed. After its end nothing touches memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import Sender
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkSnapshot

MAX_QUESTION_BYTES = 2**16
"""Bytes of a question, and of an answer without what follows it."""
MAX_ANSWER_BYTES = 4 * 2**20
"""Bytes that may follow the answer to one question. One connection carries them; longer READs may
take several.
"""
MAX_ANSWER_PIECES = 1024
"""Pieces in which they may come."""


class Op(str, Enum):
    """The direction of a batch, seen from the engine that submits it."""

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
    """The number by which the owner lets us WRITE, if it guards the memory."""
    question: bytes = b""
    """A message to the owner, for READ: it chooses what it sends, and sends it behind its answer.
    The `ops`, all of one size, say where that goes, and none that nothing may come; their remote
    places do not count. A question is asked once: it is not sent again when a connection breaks.
    """


class TransferDone(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a batch: an event for the machine that submitted it."""

    batch_id: int
    error: str | None = None
    """None = every byte has arrived."""
    num_bytes: int = 0
    seconds: float = 0.0
    protocol: str = ""
    """The protocol that moved it: "shm", "rdma", "tcp", "inproc", or "stage" if it went through
    slots of host memory; empty if not known.
    """
    nics: tuple[str, ...] = ()
    """This process's ends of the links that carried it, sorted: devices of RDMA, IP addresses of
    TCP. Empty where bytes were copied from memory to memory.
    """
    answer: bytes = b""
    """The owner's answer to the batch's question. `num_bytes` came behind it, into the first
    ops.
    """


Ended = Callable[[TransferDone, float], None]
"""Called with (how a transfer, or several that are one for the caller, ended, now)."""


@dataclass
class Carried:
    """What several transfers have carried together."""

    num_bytes: int = 0
    seconds: float = 0.0
    """The sum of their times."""
    protocol: str = ""
    """The protocol of the last of them."""
    nics: set[str] = field(default_factory=set)
    """See `TransferDone.nics`."""

    def add(self, more: TransferDone | Carried) -> None:
        """Count one more transfer, or several."""
        self.num_bytes += more.num_bytes
        self.seconds += more.seconds
        self.protocol = more.protocol or self.protocol
        self.nics.update(more.nics)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's question: an event for the machine that called `hear_questions`. `AskEnded`
    follows.
    """

    number: int
    question: bytes
    piece_bytes: int
    """Bytes of the pieces in which the peer takes what comes behind the answer; 0: it takes none.
    """
    sender: Sender
    """The peer, as its connection has proven it."""
    whence: str
    """The IP address at the other end of the connection."""
    asker: int = 0
    """The number of the connection; 0: its end is not told."""


class AskEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a question: its answer has been sent with its bytes, or its connection has ended.
    Nothing more is sent for it.
    """

    number: int


class AskerLeft(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a connection that has asked something. All its questions have ended before."""

    asker: int


TransferEvent = TransferDone | Asked | AskEnded | AskerLeft


class Pieces(msgspec.Struct, frozen=True):
    """Pieces of one region. All have one size and begin at multiples of it."""

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
        """The descriptor of memory that other processes can map; None if they cannot map it."""

    @property
    def device(self) -> str:
        """The device that holds the memory: "host", or a device such as "cuda:0"."""

    @property
    def buffer(self) -> memoryview:
        """The memory itself, writable, format "B". Raises ValueError if the host cannot address
        it.
        """

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterable[memoryview]:
        """Return the bytes of (offset, length) ranges, in pieces. Checks use it; KV moves in other
        ways.

        Waits for a device, about 0.1 ms for a MiB. Raises TransferError when the device fails.
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
        """Let a pool client touch pieces of memory. `holder` is the channel key of its credential.
        Other pool clients are refused, and so is this one outside the pieces. Workers need no loan.
        """

    def take_back(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        """End a loan. On return the client touches none of the pieces, except those that were lent
        to it again.
        """

    def guard(self, region: Region) -> None:
        """Allow peers to write to a region only by a grant that was not revoked."""

    def grant(self) -> int:
        """Return the number of a new grant, for one writer. Raises TransferError when too many are
        open.
        """

    def revoke(self, grant: int) -> None:
        """Refuse writes by this grant from now on. The grant may come from another engine. Writes
        that have begun may still land: see `fence`.
        """

    def fence(self, grant: int) -> Fence:
        """Return whether something may still be written by a revoked grant. Call it
        `resting.FIRST_LOOK_S` after `revoke` or later. It waits for copies in hand, of at most 4
        MiB each.
        """

    def submit(self, batch: TransferBatch) -> int:
        """Start a batch and return its id; never blocks. A batch that cannot be done fails through
        its `TransferDone`.
        """

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop. Its `TransferDone` still comes; it reports success if the batch was
        done first.
        """

    def takes_questions(self, peer: SegmentRef) -> bool:
        """Return whether a batch to this peer may have a question. It may not when its bytes would
        go by shared memory or RDMA: the owner has no part in that.
        """

    def hear_questions(self) -> None:
        """Take peers' questions from now on, as events, and tell peers so in `segment`."""

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        """Answer a question, and send the pieces behind the answer. They must stay as they are
        until the question has ended. Nothing happens when it has ended already.
        """

    def refuse(self, number: int, reason: str) -> None:
        """Refuse a question. Nothing happens when it has ended already."""

    def counters(self) -> Mapping[str, float]:
        """Return sums since the start, by name; reported with a worker's load."""


class PolledTransfer(Transfer, Protocol):
    """A transfer engine that a driver's loop polls."""

    def register_device(self, memory: DeviceMemory, label: str) -> Region:
        """Register memory that the host cannot address. Batches reach it directly where the
        hardware can, else through pinned host memory. Raises TransferError.
        """

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a batch ended."""

    def poll(self) -> Sequence[TransferDone]:
        """Return the batches that ended since the last call, without waiting."""

    def events(self) -> Sequence[TransferEvent]:
        """Return what `poll` does, and peers' questions."""

    def offer_events(self, take: Callable[[], bool]) -> None:
        """Have threads that move bytes call `take` when there are events, so that no other thread
        need wake for them. They call it again once they have handled these events and no event is
        left. If it returns False, the descriptor becomes readable.
        """

    def links(self) -> Sequence[LinkSnapshot]:
        """Return the counters of each link since the start; from any thread."""

    def close(self) -> None:
        """Refuse peers, end all batches, free the memory."""
