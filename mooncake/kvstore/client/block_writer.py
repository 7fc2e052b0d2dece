"""Writes blocks to pool nodes in two phases: `PutStart` asks for room, the caller fills what was
granted, `PutEnd` makes the blocks readable.

A few blocks take one question and one answer, if the caller can and the node takes such questions:
`PutStart` goes over the data connection with the bytes behind it, the node writes them where it has
room, and `PutGranted` names the blocks that are readable now. What fails so is written in the other
way.

A pure state machine that engines and clients of the pool share. It owns tickets; the caller moves
the bytes to the node. A ticket ends exactly once, when nothing writes to the granted memory any
more. The node may then trust the memory or reuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    MooncakeError,
    ProtocolError,
    PutEnd,
    PutGranted,
    PutStart,
    SegmentRef,
    TransferError,
    Unavailable,
    WorkerRef,
)
from mooncake.base.messages import NO_HEAD, ChainHead
from mooncake.kvstore.client.askable import AskableNodes
from mooncake.kvstore.client.block_reader import is_of
from mooncake.rpc.channel import Channel
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import MAX_QUESTION_BYTES, TransferDone

ASK_AGAIN_S = 1.0
"""Nodes answer at once. After this time the question or its answer counts as lost. A node grants
each ticket once, however often it is asked.
"""


Offer = Callable[[SegmentRef, bytes, Callable[[TransferDone, float], None]], bool]
"""(peer, question, ended) -> whether the blocks are on their way behind the question. `ended` is
called once, with the end of the transfer. False: they have to go by another way.
"""


@dataclass(kw_only=True)
class BlockWrite:
    """One put: what to write, and how."""

    store: WorkerRef
    keys: Sequence[BlockKey]
    timeout_s: float
    """The put is given up when the node has not answered this long after the next tick, unless
    `answer_by_s` is given.
    """
    fill: Callable[[Sequence[BlockKey], BlockPlaces, float], None]
    """Called with (granted keys, their places, now) when the node gives room; it starts to write.
    Then `BlockWriter.end` must be called once nothing writes any more.
    """
    stop: Callable[[float], None]
    """Called with now when the node is lost while the blocks are written or offered."""
    ended: Callable[[list[BlockKey] | MooncakeError, float], None]
    """Called once with (keys that were written or why none was, now)."""
    offer: Offer | None = None
    """Sends the blocks behind a question, if that is possible."""
    answer_by_s: float | None = None
    """When the put is given up if the node has not answered."""
    ticket: int = 0
    """The ticket of the latest question."""
    granted: list[BlockKey] | None = None
    """None: the node has not answered yet."""
    ask_again_s: float | None = None
    question: PutStart | None = None
    """The question that was asked. It is asked again while no answer comes, because it or its
    answer may be lost.
    """
    is_offered: bool = False
    """True while the blocks follow their question."""
    given_up: bool = False
    """True if the node was lost meanwhile."""


class BlockWriter:
    """Writes blocks to pool nodes: owns all puts of one process."""

    def __init__(self, writer: WorkerRef, channel: Channel) -> None:
        self._writer = writer
        self._channel = channel
        self._writes: dict[int, BlockWrite] = {}
        self._last_ticket = 0
        self._askable = AskableNodes()

    @property
    def num_open(self) -> int:
        return len(self._writes)

    def start(self, write: BlockWrite, tenant: str, head: ChainHead = NO_HEAD) -> int:
        """Ask for room for blocks that follow `head` in their chain; return the ticket. A write
        that has an `offer` may need another ticket later (`BlockWrite.ticket`).
        """
        question = self._put_start(write.keys, tenant, head)
        self._begin(write, question)
        if not self._offer(write, question):
            self._channel.send(write.store.address, question)
        return write.ticket

    def _begin(self, write: BlockWrite, question: PutStart) -> None:
        write.ticket, write.question = question.ticket, question
        self._writes[write.ticket] = write

    def _offer(self, write: BlockWrite, question: PutStart) -> bool:
        """Send blocks behind their question over the data connection, if that is possible."""
        peer = self._askable.segment_of(write.store.address)
        if write.offer is None or peer is None:
            return False
        encoded = encode(question)
        if len(encoded) > MAX_QUESTION_BYTES:
            return False
        answered = partial(self._on_answered, write, self._askable.begin(), peer)
        write.is_offered = write.offer(peer, encoded, answered)
        return write.is_offered

    def _on_answered(
        self, write: BlockWrite, number: int, peer: SegmentRef, done: TransferDone, now: float
    ) -> None:
        """End a put whose blocks followed their question. If that failed, ask by a message."""
        try:
            granted = None if done.error is not None else decode(done.answer)
        except ProtocolError:
            granted = None
        if (
            not isinstance(granted, PutGranted)
            or granted.ticket != write.ticket
            or not set(granted.keys) <= set(write.keys)
        ):
            granted = None
        if not write.given_up:
            self._askable.ended(number, peer, is_answered=granted is not None)
        del self._writes[write.ticket]
        write.is_offered = False
        if granted is not None:
            write.ended(granted.keys, now)
        elif write.given_up or write.question is None:
            write.ended(TransferError(done.error or "the put was cancelled"), now)
        else:
            first = write.question
            question = self._put_start(first.keys, first.tenant, first.head)
            self._begin(write, question)
            self._channel.send(write.store.address, question)

    def report_use(self, store: WorkerRef, head: ChainHead) -> None:
        """Tell a node that a chain is used, when nothing of it is to be written. The message may be
        lost: nothing depends on it.
        """
        self._channel.send(store.address, self._put_start([], "", head))

    def on_granted(self, message: PutGranted, now: float) -> None:
        """Have the granted blocks filled. If the put is over already, give them back."""
        write = self._writes.get(message.ticket)
        if write is None or write.store.address != message.store.address:
            self._give_back(message.store, message.ticket, message.keys)
            return
        if write.granted is not None or write.is_offered:
            return
        self._askable.learn(message.store.address, message.places.segment)
        write.granted = message.keys
        if message.keys:
            write.fill(message.keys, message.places, now)
        else:
            del self._writes[message.ticket]
            write.ended([], now)

    def end(
        self,
        ticket: int,
        written: list[BlockKey],
        now: float,
        error: MooncakeError | None = None,
        checksums: Sequence[int] = (),
    ) -> None:
        """End a put. The blocks `written` are complete at the node, with the checksum of each or
        none; all others that it granted are not. With an error no block is complete.
        """
        write = self._writes.pop(ticket)
        whole = set(written)
        granted = write.keys if write.granted is None else write.granted
        dropped = [key for key in granted if key not in whole]
        self._channel.send(
            write.store.address,
            PutEnd(
                writer=self._writer,
                ticket=ticket,
                written=written,
                dropped=dropped,
                checksums=list(checksums),
            ),
        )
        write.ended(error or written, now)

    def on_refused(self, ticket: int, error: MooncakeError, now: float) -> None:
        """End a put that the node refused."""
        write = self._writes.get(ticket)
        if write is not None and write.granted is None and not write.is_offered:
            self.end(ticket, [], now, error)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """End the puts that the lost node has not granted yet, and stop what is being written."""
        self._askable.forget(worker.address)
        for ticket, write in list(self._writes.items()):
            if not is_of(write.store, worker):
                continue
            if write.granted is None and not write.is_offered:
                self.end(ticket, [], now, Unavailable("the pool node was lost"))
            else:
                write.given_up = True
                write.stop(now)

    def tick(self, now: float) -> float | None:
        """Ask nodes that do not answer again, and give them up in the end. Return when to call
        again.
        """
        next_s: float | None = None
        for ticket, write in list(self._writes.items()):
            if write.granted is not None or write.is_offered:
                continue
            if write.answer_by_s is None:
                write.answer_by_s = now + write.timeout_s
            if write.ask_again_s is None:
                write.ask_again_s = now + ASK_AGAIN_S
            if write.answer_by_s <= now:
                where = write.store.address
                error = TransferError(f"the pool node at {where} does not answer")
                self.end(ticket, [], now, error)
                continue
            if write.ask_again_s <= now and write.question is not None:
                self._channel.send(write.store.address, write.question)
                write.ask_again_s = now + ASK_AGAIN_S
            due_s = min(write.answer_by_s, write.ask_again_s)
            next_s = due_s if next_s is None else min(next_s, due_s)
        return next_s

    def _put_start(self, keys: Sequence[BlockKey], tenant: str, head: ChainHead) -> PutStart:
        """Return a question with a new ticket."""
        self._last_ticket += 1
        return PutStart(
            writer=self._writer, ticket=self._last_ticket, keys=list(keys), tenant=tenant, head=head
        )

    def _give_back(self, store: WorkerRef, ticket: int, keys: list[BlockKey]) -> None:
        put_end = PutEnd(writer=self._writer, ticket=ticket, dropped=keys)
        self._channel.send(store.address, put_end)
