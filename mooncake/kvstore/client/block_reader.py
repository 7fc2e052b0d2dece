"""Reads runs of blocks from pool nodes into registered memory: `PinBlocks`, READ, verify, `Unpin`.
It repeats this while the node has more of the run, which may come from its disks in pieces.

A short run takes one question and one answer, if the node takes questions: `PinBlocks` goes over
the data connection, the bytes come behind `PinGranted`, and the node unpins them itself. Blocks
that do not come so, for any reason, are read in the other way.

A pure state machine that engines, clients of the pool and replicating nodes share. It owns tickets
and batches of reads; the caller owns memory and keys. A read ends exactly once, when nothing writes
to its memory any more. What arrived before an error counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    MooncakeError,
    PinBlocks,
    PinGranted,
    ProtocolError,
    SegmentRef,
    TransferError,
    Unavailable,
    Unpin,
    WorkerRef,
)
from mooncake.base.bounded_map import BoundedMap
from mooncake.base.messages import NO_HEAD, ChainHead
from mooncake.rpc.channel import Channel
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import MAX_QUESTION_BYTES, Carried, Ended, TransferDone

VERIFY_BYTES_PER_TICK = 8 << 20
"""Bytes hashed in one tick: less than a millisecond, so that nothing else waits long."""


@dataclass(frozen=True)
class ReadResult:
    """The end of a read."""

    num_blocks: int
    """Number of leading blocks of the run that lie in memory; verified ones match their
    checksums.
    """
    checksums: list[int]
    """The checksum that the node promised for each of them; 0: none."""
    error: MooncakeError | None
    """The reason why no more came. None: all came, the node has no more, or a block arrived
    damaged.
    """
    carried: Carried
    """What the transfers that succeeded have moved."""
    num_from_ssd: int
    """How many of the blocks the node had to bring up from its disks."""
    num_from_object: int
    """How many of the blocks came from the node's bucket."""


class ReadPort(Protocol):
    """The memory that blocks are read into, and what moves them.

    Only the port knows what `places` are: a sequence with one place for each block, whose slices
    are places too.
    """

    def read(self, places: Any, there: BlockPlaces, deadline_s: float, ended: Ended, /) -> int:
        """Begin to read the blocks `there` into `places`; return a number for `cancel`. `ended` is
        called once, with the end of the transfers.
        """

    def ask(
        self,
        places: Any,
        peer: SegmentRef,
        question: bytes,
        deadline_s: float,
        ended: Ended,
        /,
    ) -> tuple[int, int] | None:
        """Begin to ask a peer for blocks, which come into `places` behind its answer. Return a
        number for `cancel` and the bytes of each block, or None if the bytes have to go by another
        way. `ended` is called once.
        """

    def cancel(self, number: int) -> None:
        """Ask a read or a question to stop. It still ends through `ended`."""

    def checksum(self, places: Any, index: int) -> int:
        """Return the checksum of a block that was read. Raises TransferError when that fails."""


ReadEnded = Callable[[ReadResult, float], None]
"""(result, now)"""


_MAX_KNOWN = 1024
"""Nodes whose segments are remembered."""
MAX_UNANSWERED = 3
"""After this many questions in a row without an answer, as where the data connection comes from
another host than the messages, the node is no longer asked.
"""


class _Stage(Enum):
    PINNING = 0
    READING = 1
    VERIFYING = 2
    ASKING = 3


@dataclass(kw_only=True)
class _Read:
    """A read, and its current piece."""

    number: int
    store: WorkerRef
    keys: Sequence[BlockKey]
    """Keys of this piece and of those to come; `places` likewise."""
    places: Any
    deadline_s: float
    answer_by_s: float
    """When the read is given up unless the node has answered."""
    head: ChainHead
    """The blocks of the chain before this piece."""
    ended: ReadEnded
    stage: _Stage = _Stage.PINNING
    batch_id: int = -1
    by_message: bool = False
    """True if the node is not asked over the data connection (any more)."""
    block_bytes: int = 0
    """Bytes of each block of this piece, if it was asked for over the data connection."""
    given_up: bool = False
    num_blocks: int = 0
    """Blocks of this piece."""
    more: bool = False
    """True if the node has blocks behind this piece."""
    piece_from_ssd: int = 0
    """Blocks of this piece that came up from a disk."""
    piece_from_object: int = 0
    """Blocks of this piece that came from a bucket."""
    num_from_ssd: int = 0
    num_from_object: int = 0
    """The same counts for the blocks that have arrived."""
    promised: list[int] = field(default_factory=list)
    """Checksum of each block of this piece; 0: none."""
    num_verified: int = 0
    arrived: list[int] = field(default_factory=list)
    """Checksum of each block that has arrived, in the pieces before too."""
    piece_bytes: int = 0
    carried: Carried = field(default_factory=Carried)

    def advance(self) -> None:
        """Go on to the next piece: all of this one has arrived."""
        before = [*self.head.keys, *self.keys[: self.num_blocks]]
        self.head = ChainHead(before, len(before), self.head.num_kept, self.head.keep_s)
        self.keys, self.places = self.keys[self.num_blocks :], self.places[self.num_blocks :]
        self.stage, self.answer_by_s = _Stage.PINNING, self.deadline_s
        self.num_verified, self.block_bytes = 0, 0
        self.by_message = True


class AskedNodes:
    """The nodes that may be asked over their data connections."""

    def __init__(self) -> None:
        self._segments: BoundedMap[str, SegmentRef] = BoundedMap(_MAX_KNOWN)
        """The memory of each node that has granted something, by the node's address."""
        self._unanswered: BoundedMap[str, tuple[int, int]] = BoundedMap(_MAX_KNOWN)
        """How many times in a row a node has not answered, and the newest ticket when that was
        counted last, by the id of its engine.
        """

    def learn(self, address: str, segment: SegmentRef) -> None:
        """Know where a node's memory is."""
        self._segments[address] = segment

    def forget(self, address: str) -> None:
        """Ask a node that was lost no more."""
        self._segments.pop(address, None)

    def find(self, address: str) -> SegmentRef | None:
        """Return the memory of a node, by which it may be asked."""
        segment = self._segments.get(address)
        if segment is None or self._unanswered.get(segment.engine_id, (0, 0))[0] >= MAX_UNANSWERED:
            return None
        return segment

    def count(self, engine_id: str, ticket: int, last_ticket: int, *, is_answered: bool) -> None:
        """Count whether a question was answered. Questions that were under way together count once:
        one broken connection ends all of them.
        """
        missed, newest = self._unanswered.get(engine_id, (0, 0))
        if is_answered:
            self._unanswered[engine_id] = 0, 0
        elif ticket > newest:
            self._unanswered[engine_id] = missed + 1, last_ticket


class BlockReader:
    """Reads blocks from pool nodes: owns all reads of one process."""

    def __init__(
        self, reader: WorkerRef, channel: Channel, memory: ReadPort, *, verify: bool
    ) -> None:
        """If `verify` is set, blocks that arrive are compared with the checksums that nodes
        promise.
        """
        self._reader = reader
        self._channel = channel
        self._memory = memory
        self._verify = verify
        self._reads: dict[int, _Read] = {}
        """Open reads by the ticket of their piece."""
        self._verifying: deque[int] = deque()
        self._last_ticket = 0
        self._nodes = AskedNodes()
        self.num_corrupt = 0
        """Blocks that arrived with other contents than promised."""

    @property
    def num_open(self) -> int:
        return len(self._reads)

    def start(
        self,
        store: WorkerRef,
        keys: Sequence[BlockKey],
        places: Any,
        deadline_s: float,
        ended: ReadEnded,
        *,
        answer_by_s: float = float("inf"),
        head: ChainHead = NO_HEAD,
    ) -> int:
        """Read the run `keys`, which follows `head` in its chain, from `store` into `places`;
        return the number of the read, for `cancel`.

        The read fails at `deadline_s`, or when the node has not answered by `answer_by_s`.
        """
        number = self._last_ticket + 1
        self._begin(_Read(
            number=number, store=store, keys=keys, places=places, deadline_s=deadline_s,
            answer_by_s=min(deadline_s, answer_by_s), head=head, ended=ended,
        ))  # fmt: skip
        return number

    def cancel(self, number: int, now: float) -> None:
        """Stop a read; it still ends through its callback. An unknown number does nothing."""
        for ticket, read in list(self._reads.items()):
            if read.number == number:
                read.deadline_s = now
                self._stop(ticket, now, TransferError("the read was cancelled"))

    def on_granted(self, message: PinGranted, now: float) -> None:
        """Read what the node pinned. If the read is over already, unpin it."""
        read = self._reads.get(message.ticket)
        if read is None or read.store.address != message.store.address:
            self._unpin(message.store, message.ticket)
            return
        if read.stage is not _Stage.PINNING:
            return
        self._nodes.learn(message.store.address, message.places.segment)
        if not self._take_grant(message, now):
            return
        read.stage = _Stage.READING
        places, arrived = read.places[: read.num_blocks], partial(self._on_arrived, message.ticket)
        read.batch_id = self._memory.read(places, message.places, read.deadline_s, arrived)

    def _take_grant(self, message: PinGranted, now: float) -> bool:
        """Note what the node has pinned. If it is nothing, the piece ends; return False then."""
        read = self._reads[message.ticket]
        count = read.num_blocks = min(message.num_blocks, len(read.keys))
        read.more = message.more and count < len(read.keys)
        read.piece_from_ssd = message.num_from_ssd
        read.piece_from_object = message.num_from_object
        read.promised = [*message.checksums[:count], *[0] * (count - len(message.checksums))]
        if not count:
            self._end(message.ticket, 0, now)
        return count > 0

    def _on_answered(self, ticket: int, engine: str, done: TransferDone, now: float) -> None:
        """Take the node's answer and the blocks that came behind it. Pin by a message the blocks
        that the answer lacks: they may be on a disk, and messages of ours may still be on their
        way.
        """
        read = self._reads[ticket]
        try:
            granted = None if done.error is not None else decode(done.answer)
        except ProtocolError:
            granted = None
        if not isinstance(granted, PinGranted) or (
            (granted.ticket, granted.num_blocks) != (ticket, done.num_bytes // read.block_bytes)
        ):
            granted = None
        if not read.given_up:
            self._nodes.count(engine, ticket, self._last_ticket, is_answered=granted is not None)
        if granted is not None and granted.num_blocks:
            self._take_grant(granted, now)
            self._on_arrived(ticket, done, now)
        elif read.given_up:
            self._end(ticket, 0, now, TransferError(done.error or "the read was cancelled"))
        else:
            del self._reads[ticket]
            read.by_message, read.stage, read.block_bytes = True, _Stage.PINNING, 0
            self._begin(read)

    def _on_arrived(self, ticket: int, done: TransferDone, now: float) -> None:
        """Check what has arrived. If its transfer failed, the piece ends here."""
        read = self._reads[ticket]
        if done.error is not None:
            self._end(ticket, 0, now, TransferError(done.error))
            return
        read.piece_bytes = done.num_bytes
        read.carried.add(done)
        if self._verify and any(read.promised):
            read.stage = _Stage.VERIFYING
            self._verifying.append(ticket)
        else:
            self._end(ticket, read.num_blocks, now)

    def on_refused(self, ticket: int, error: MooncakeError, now: float) -> None:
        """End a read that the node refused."""
        read = self._reads.get(ticket)
        if read is not None and read.stage is _Stage.PINNING:
            self._end(ticket, 0, now, error)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """End the reads that the lost node has not granted yet, and cancel running transfers."""
        self._nodes.forget(worker.address)
        for ticket, read in list(self._reads.items()):
            if is_of(read.store, worker) and read.stage is not _Stage.VERIFYING:
                self._stop(ticket, now, Unavailable("the pool node was lost"))

    def tick(self, now: float) -> float | None:
        """Verify some of what arrived, and give up nodes that do not answer. Return when to call
        again.
        """
        self._verify_some(now)
        next_s: float | None = None
        for ticket, read in list(self._reads.items()):
            if read.stage is not _Stage.PINNING:
                continue
            if read.answer_by_s <= now:
                where = read.store.address
                error = TransferError(f"the pool node at {where} does not answer")
                self._end(ticket, 0, now, error)
            elif next_s is None or read.answer_by_s < next_s:
                next_s = read.answer_by_s
        return now if self._verifying else next_s

    def check_integrity(self) -> None:
        """Raise AssertionError when a read waits for verification without cause, or is forgotten
        there.
        """
        verifying = [t for t, read in self._reads.items() if read.stage is _Stage.VERIFYING]
        assert sorted(self._verifying) == sorted(verifying)

    def _begin(self, read: _Read) -> None:
        """Begin with the current piece of a read."""
        self._last_ticket += 1
        ticket = self._last_ticket
        self._reads[ticket] = read
        message = PinBlocks(
            reader=self._reader, ticket=ticket, keys=list(read.keys), head=read.head
        )
        if not self._ask(read, message):
            self._channel.send(read.store.address, message)

    def _ask(self, read: _Read, message: PinBlocks) -> bool:
        """Ask for the bytes of a piece over the data connection, if that is possible."""
        segment = None if read.by_message else self._nodes.find(read.store.address)
        if segment is None:
            return False
        question = encode(message)
        if len(question) > MAX_QUESTION_BYTES:
            return False
        by_s = min(read.deadline_s, read.answer_by_s)
        answered = partial(self._on_answered, message.ticket, segment.engine_id)
        begun = self._memory.ask(read.places, segment, question, by_s, answered)
        if begun is None:
            return False
        read.stage = _Stage.ASKING
        read.batch_id, read.block_bytes = begun
        return True

    def _unpin(self, store: WorkerRef, ticket: int, corrupt: Sequence[BlockKey] = ()) -> None:
        unpin = Unpin(reader=self._reader, ticket=ticket, corrupt=list(corrupt))
        self._channel.send(store.address, unpin)

    def _stop(self, ticket: int, now: float, error: MooncakeError) -> None:
        """End a read now, or when its transfer has stopped."""
        read = self._reads[ticket]
        if read.stage in (_Stage.READING, _Stage.ASKING):
            read.given_up = True
            self._memory.cancel(read.batch_id)
        else:
            self._end(ticket, 0, now, error)

    def _verify_some(self, now: float) -> None:
        num_bytes = 0
        while self._verifying and num_bytes < VERIFY_BYTES_PER_TICK:
            ticket = self._verifying[0]
            read = self._reads[ticket]
            index = read.num_verified
            if index == read.num_blocks:
                self._end(ticket, index, now)
                continue
            promised = read.promised[index]
            try:
                is_right = not promised or self._memory.checksum(read.places, index) == promised
            except TransferError as error:  # of a device
                self._end(ticket, index, now, error)
                continue
            if not is_right:
                self.num_corrupt += 1
                self._end(ticket, index, now, corrupt=[read.keys[index]])
                continue
            read.num_verified += 1
            num_bytes += read.piece_bytes // read.num_blocks

    def _end(
        self,
        ticket: int,
        num_blocks: int,
        now: float,
        error: MooncakeError | None = None,
        corrupt: Sequence[BlockKey] = (),
    ) -> None:
        """End a piece of which this many leading blocks came. The read ends too, unless the piece
        is complete, the node has more, and there is time.
        """
        read = self._reads.pop(ticket)
        if read.stage is _Stage.VERIFYING:
            self._verifying.remove(ticket)
        if corrupt or not read.block_bytes:  # the node unpins by itself what was asked for
            self._unpin(read.store, ticket, corrupt)
        read.arrived += read.promised[:num_blocks]
        from_ssd = min(read.piece_from_ssd, num_blocks)
        read.num_from_ssd += from_ssd
        read.num_from_object += min(read.piece_from_object, num_blocks - from_ssd)
        whole = num_blocks and num_blocks == read.num_blocks
        if whole and read.more and now < read.deadline_s:
            read.advance()
            self._begin(read)
            return
        result = ReadResult(
            len(read.arrived), read.arrived, error, read.carried, read.num_from_ssd,
            read.num_from_object,
        )  # fmt: skip
        read.ended(result, now)


def is_of(store: WorkerRef, worker: WorkerRef) -> bool:
    """Return whether the lost `worker` is the node `store`, of which perhaps only the address is
    known.
    """
    return store == worker or (not store.epoch and store.address == worker.address)
