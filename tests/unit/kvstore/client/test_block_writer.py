"""Asking for room over the data connection, and by a message where that does not give all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    MooncakeError,
    PutEnd,
    PutGranted,
    PutStart,
    SegmentRef,
    WorkerRef,
)
from mooncake.kvstore.client.block_reader import MAX_UNANSWERED
from mooncake.kvstore.client.block_writer import BlockWrite, BlockWriter
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import MAX_ANSWER_PIECES, Ended, TransferDone

HERE = WorkerRef("client", "e1", "here")
STORE = WorkerRef("kvstore-0", "e2", "there")
PLACES = BlockPlaces(SegmentRef("engine", {}, "h"), 1, 8, [])
A, B = (bytes([number]) * 16 for number in range(2))


class Write(BlockWrite):
    """A put that notes what becomes of it."""

    def __init__(self, *keys: BlockKey) -> None:
        super().__init__(store=STORE, keys=keys, timeout_s=10.0)
        self.filled: list[BlockKey] = []
        self.answer: list[BlockKey] | MooncakeError | None = None

    def fill(self, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        self.filled = list(keys)

    def stop(self, now: float) -> None:
        raise AssertionError("no node is lost here")

    def ended(self, answer: list[BlockKey] | MooncakeError, now: float) -> None:
        self.answer = answer


class Scene:
    """A writer that knows its node, and what it says to it on both ways."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.asked: list[tuple[PutStart, Ended]] = []
        self.takes = True
        self.writer = BlockWriter(HERE, self, self.ask)
        self.begin(A)
        assert [type(each) for each in self.sent] == [PutStart], "it does not know the node yet"
        assert not self.asked
        self.writer.on_granted(self.granted(1, []), 0.0)
        self.sent.clear()

    def send(self, _address: str, message: object) -> None:
        self.sent.append(message)

    def ask(self, segment: SegmentRef, question: bytes, ended: Ended) -> bool:
        assert segment == PLACES.segment
        if self.takes:
            message = decode(question)
            assert isinstance(message, PutStart)
            self.asked.append((message, ended))
        return self.takes

    def begin(self, *keys: BlockKey) -> Write:
        write = Write(*keys)
        self.writer.start(write, "tenant")
        return write

    def granted(self, ticket: int, keys: list[BlockKey]) -> PutGranted:
        return PutGranted(asker=HERE, ticket=ticket, store=STORE, keys=keys, places=PLACES)

    def answer(self, keys: list[BlockKey]) -> None:
        """Answer the last question over the data connection."""
        question, ended = self.asked[-1]
        answer = encode(self.granted(question.ticket, keys))
        ended(TransferDone(batch_id=1, answer=answer), 0.0)

    def fail(self) -> None:
        """Lose the answer to the last question."""
        self.asked[-1][1](TransferDone(batch_id=1, error="the connection broke"), 0.0)


def test_what_is_granted_in_full_takes_no_message() -> None:
    scene = Scene()
    write = scene.begin(A, B)
    scene.answer([A, B])
    assert write.filled == [A, B]
    assert not scene.sent
    scene.writer.end(write, [A, B], 0.0)
    assert scene.sent == [PutEnd(writer=HERE, ticket=2, written=[A, B])]
    assert (write.answer, scene.writer.num_open) == ([A, B], 0)


@pytest.mark.parametrize("given", [[], [B]])
def test_what_is_not_granted_is_asked_for_again_behind_our_messages(given: list[BlockKey]) -> None:
    scene = Scene()
    write = scene.begin(A, B)
    scene.answer(given)
    again = PutStart(writer=HERE, ticket=3, keys=[A, B], tenant="tenant")
    dropped = [PutEnd(writer=HERE, ticket=2, dropped=given)] if given else []
    assert scene.sent == [*dropped, again], "a ticket that has ended is never opened again"
    assert not write.filled
    scene.writer.on_granted(scene.granted(3, [A]), 0.0)
    assert write.filled == [A]
    assert scene.writer.num_open == 1


def test_a_question_without_an_answer_is_asked_by_a_message() -> None:
    """By the same ticket: the node may have granted it."""
    scene = Scene()
    write = scene.begin(A)
    scene.fail()
    assert scene.sent == [PutStart(writer=HERE, ticket=2, keys=[A], tenant="tenant")]
    scene.writer.on_granted(scene.granted(2, [A]), 0.0)
    assert write.filled == [A]


def test_an_answer_that_comes_too_late_is_given_back() -> None:
    scene = Scene()
    write = scene.begin(A)
    assert scene.writer.tick(0.0) == 1.0
    assert scene.writer.tick(10.0) is None
    assert isinstance(write.answer, MooncakeError)
    scene.sent.clear()
    scene.answer([A])
    assert scene.sent == [PutEnd(writer=HERE, ticket=2, dropped=[A])]
    assert not write.filled
    scene.sent.clear()
    scene.begin(A)
    scene.writer.on_peer_lost(WorkerRef("kvstore-0", "another", "there"), 0.0)
    scene.fail()
    assert scene.sent == [PutStart(writer=HERE, ticket=3, keys=[A], tenant="tenant")]


def test_a_node_that_does_not_answer_is_asked_by_messages_only() -> None:
    scene = Scene()
    for _ in range(MAX_UNANSWERED):
        scene.begin(A)
        scene.fail()
    assert len(scene.asked) == MAX_UNANSWERED
    scene.begin(A)
    assert len(scene.asked) == MAX_UNANSWERED
    assert len(scene.sent) == MAX_UNANSWERED + 1


def test_what_cannot_be_asked_goes_by_a_message() -> None:
    scene = Scene()
    scene.begin(*[number.to_bytes(16, "big") for number in range(MAX_ANSWER_PIECES + 1)])
    scene.takes = False
    scene.begin(A)
    assert not scene.asked
    assert len(scene.sent) == 2
    scene.takes = True
    scene.writer.on_peer_lost(STORE, 0.0)
    scene.begin(A)
    assert not scene.asked, "a node that was lost is not known any more"
