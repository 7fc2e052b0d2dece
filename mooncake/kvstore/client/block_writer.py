"""Writes blocks to pool nodes in two phases: `PutStart` asks for room, the caller fills what was
granted, `PutEnd` makes the blocks readable.

`PutStart` goes over the data connection if the node takes questions there: that saves two threads
at each end. It may then overtake our earlier messages. So what the node does not grant in full is
asked for again by a message, behind them.

A pure state machine that engines and clients of the pool share. It owns tickets; the caller moves
the bytes to the node. A ticket ends exactly once, when nothing writes to the granted memory any
more. The node may then trust the memory or reuse it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

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
from mooncake.kvstore.client.block_reader import AskedNodes, is_of
from mooncake.rpc.channel import Channel
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import MAX_ANSWER_PIECES, MAX_QUESTION_BYTES, Ended, TransferDone

Ask = Callable[[SegmentRef, bytes, Ended], bool]
"""Begins to ask the owner of a memory over the data connection, and calls back once. False: it
cannot be asked so.
"""
ASK_AGAIN_S = 1.0
"""Nodes answer at once. After this time the question or its answer counts as lost. A node grants
each ticket once, however often it is asked.
"""


@dataclass(kw_only=True, eq=False)
class BlockWrite(ABC):
    """One put: what to write, and where. A subclass moves the bytes."""

    store: WorkerRef
    keys: Sequence[BlockKey]
    timeout_s: float
    """The put is given up when the node has not answered this long after the next tick."""
    ticket: int = 0
    granted: list[BlockKey] | None = None
    """None: the node has not answered yet."""
    answer_by_s: float | None = None
    ask_again_s: float = 0.0
    question: PutStart | None = None
    """The question that was asked. It is asked again while no answer comes, because it or its
    answer may be lost.
    """

    @abstractmethod
    def fill(self, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        """Start to write the granted `keys` to `places`. Then `BlockWriter.end` must be called once
        nothing writes any more.
        """

    @abstractmethod
    def stop(self, now: float) -> None:
        """Stop writing: the node is lost."""

    @abstractmethod
    def ended(self, answer: list[BlockKey] | MooncakeError, now: float) -> None:
        """Take the keys that were written, or why none was. It is called once."""


class BlockWriter:
    """Writes blocks to pool nodes: owns all puts of one process."""

    def __init__(self, writer: WorkerRef, channel: Channel, ask: Ask = lambda *_: False) -> None:
        self._writer = writer
        self._channel = channel
        self._ask_there = ask
        self._nodes = AskedNodes()
        self._writes: dict[int, BlockWrite] = {}
        self._last_ticket = 0
        self.num_blocks_put = 0
        self.num_puts_failed = 0
        """Puts of which not all granted blocks were written."""

    @property
    def num_open(self) -> int:
        return len(self._writes)

    def start(self, write: BlockWrite, tenant: str, head: ChainHead = NO_HEAD) -> None:
        """Ask for room for blocks that follow `head` in their chain."""
        question = self._question(write.keys, tenant, head)
        self._open(write, question)
        if not self._begin_to_ask(write, question):
            self._channel.send(write.store.address, question)

    def report_use(self, store: WorkerRef, head: ChainHead) -> None:
        """Tell a node that a chain is used, when nothing of it is to be written. The message may be
        lost: nothing depends on it.
        """
        self._channel.send(store.address, self._question([], "", head))

    def on_granted(self, message: PutGranted, now: float) -> None:
        """Have the granted blocks filled. If the put is over already, give them back."""
        self._nodes.learn(message.store.address, message.places.segment)
        write = self._writes.get(message.ticket)
        if write is None or write.store.address != message.store.address:
            self._give_back(message.store, message.ticket, message.keys)
            return
        if write.granted is not None:
            return
        write.granted = message.keys
        if message.keys:
            write.fill(message.keys, message.places, now)
        else:
            del self._writes[message.ticket]
            write.ended([], now)

    def end(
        self,
        write: BlockWrite,
        written: list[BlockKey],
        now: float,
        error: MooncakeError | None = None,
        checksums: Sequence[int] = (),
    ) -> None:
        """End a put. The blocks `written` are complete at the node, with the checksum of each or
        none; all others that it granted are not. No block is complete if there is an error.
        """
        del self._writes[write.ticket]
        whole = set(written)
        granted = write.keys if write.granted is None else write.granted
        dropped = [key for key in granted if key not in whole]
        self.num_blocks_put += len(written)
        self.num_puts_failed += write.granted is not None and bool(dropped)
        self._channel.send(
            write.store.address,
            PutEnd(
                writer=self._writer,
                ticket=write.ticket,
                written=written,
                dropped=dropped,
                checksums=list(checksums),
            ),
        )
        write.ended(error or written, now)

    def on_refused(self, ticket: int, error: MooncakeError, now: float) -> None:
        """End a put that the node refused."""
        write = self._writes.get(ticket)
        if write is not None and write.granted is None:
            self.end(write, [], now, error)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """End the puts that the lost node has not granted yet, and stop what is being written."""
        self._nodes.forget(worker.address)
        for write in list(self._writes.values()):
            if not is_of(write.store, worker):
                continue
            if write.granted is None:
                self.end(write, [], now, Unavailable("the pool node was lost"))
            else:
                write.stop(now)

    def tick(self, now: float) -> float | None:
        """Ask nodes that do not answer again, and give them up in the end. Return when to call
        again.
        """
        next_s: float | None = None
        for write in list(self._writes.values()):
            if write.granted is not None:
                continue
            if write.answer_by_s is None:
                write.answer_by_s = now + write.timeout_s
                write.ask_again_s = now + ASK_AGAIN_S
            if write.answer_by_s <= now:
                where = write.store.address
                error = TransferError(f"the pool node at {where} does not answer")
                self.end(write, [], now, error)
                continue
            if write.ask_again_s <= now and write.question is not None:
                self._channel.send(write.store.address, write.question)
                write.ask_again_s = now + ASK_AGAIN_S
            due_s = min(write.answer_by_s, write.ask_again_s)
            next_s = due_s if next_s is None else min(next_s, due_s)
        return next_s

    def _question(self, keys: Sequence[BlockKey], tenant: str, head: ChainHead) -> PutStart:
        """Return a question with a new ticket."""
        self._last_ticket += 1
        return PutStart(
            writer=self._writer, ticket=self._last_ticket, keys=list(keys), tenant=tenant, head=head
        )

    def _open(self, write: BlockWrite, question: PutStart) -> None:
        write.question, write.ticket = question, question.ticket
        self._writes[question.ticket] = write

    def _begin_to_ask(self, write: BlockWrite, question: PutStart) -> bool:
        """Ask over the data connection, if that is possible."""
        segment = self._nodes.find(write.store.address)
        if segment is None or len(question.keys) > MAX_ANSWER_PIECES:
            return False
        text = encode(question)
        answered = partial(self._on_answered, write, question, segment.engine_id)
        return len(text) <= MAX_QUESTION_BYTES and self._ask_there(segment, text, answered)

    def _on_answered(
        self, write: BlockWrite, question: PutStart, engine: str, done: TransferDone, now: float
    ) -> None:
        """Take the node's answer. Ask by a message for what it lacks."""
        try:
            granted = None if done.error is not None else decode(done.answer)
        except ProtocolError:
            granted = None
        if not isinstance(granted, PutGranted) or granted.ticket != question.ticket:
            granted = None
        self._nodes.count(
            engine, question.ticket, self._last_ticket, is_answered=granted is not None
        )
        is_open = self._writes.get(question.ticket) is write and write.granted is None
        if granted is not None and (not is_open or len(granted.keys) == len(question.keys)):
            self.on_granted(granted, now)
        elif is_open:
            if granted is not None:
                del self._writes[question.ticket]
                if granted.keys:
                    self._give_back(write.store, question.ticket, granted.keys)
                self._last_ticket += 1
                question = msgspec.structs.replace(question, ticket=self._last_ticket)
                self._open(write, question)
            self._channel.send(write.store.address, question)

    def _give_back(self, store: WorkerRef, ticket: int, keys: list[BlockKey]) -> None:
        put_end = PutEnd(writer=self._writer, ticket=ticket, dropped=keys)
        self._channel.send(store.address, put_end)
