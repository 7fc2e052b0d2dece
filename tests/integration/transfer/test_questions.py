"""Questions over TCP: the owner's machine answers, the bytes come behind the answer, and each
question ends once, whatever becomes of either side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import CredentialRole
from mooncake.transfer.engine import (
    Asked,
    AskEnded,
    AskerLeft,
    Op,
    Pieces,
    TransferBatch,
    TransferDone,
    TransferOp,
)
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.router import QUESTIONS, RoutedTransfer
from tests.support.relay import Relay
from tests.support.transfer.driving import WAIT_S, events

SIZE = 2**16
NUM = 16
QUESTION = b"which of these have you?"
Open = Callable[..., RoutedTransfer]


@pytest.fixture
def open_tcp() -> Iterator[Open]:
    opened: list[RoutedTransfer] = []

    def make(
        engine_id: str,
        protection: Protection = Protection.NONE,
        role: CredentialRole = CredentialRole.WORKER,
        protocols: tuple[str, ...] = ("tcp",),
    ) -> RoutedTransfer:
        config = TransferConfig(
            secret="secret", host="h", protocols=protocols, protection=protection, roles=[role]
        )
        opened.append(open_transfer(config, engine_id, MonotonicClock()))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


class Pair:
    """An engine that asks and one that hears."""

    def __init__(
        self,
        open_tcp: Open,
        protection: Protection = Protection.NONE,
        role: CredentialRole = CredentialRole.WORKER,
    ) -> None:
        self.asker = open_tcp("asker", protection, role)
        self.owner = open_tcp("owner", protection)
        self.here = self.asker.allocate(NUM * SIZE, "here")
        self.there = self.owner.allocate(NUM * SIZE, "there")
        self.there.buffer[:] = random.Random(1).randbytes(NUM * SIZE)
        self.owner.hear_questions()
        self.segment = self.owner.segment
        """Where questions go."""

    def ask(self, num_pieces: int = NUM, size: int = SIZE, question: bytes = QUESTION) -> int:
        """Ask for pieces, the first one to the end of the memory here."""
        ops = [
            TransferOp(self.here.region_id, (num_pieces - 1 - n) * size, 0, 0, size)
            for n in range(num_pieces)
        ]
        batch = TransferBatch(op=Op.READ, peer=self.segment, ops=ops, question=question)
        return self.asker.submit(batch)

    def hear(self) -> Asked:
        [event] = events(self.owner)
        assert isinstance(event, Asked)
        return event

    def ended(self) -> TransferDone:
        [done] = self.asker.wait(WAIT_S)
        return done

    def piece_here(self, number: int, size: int = SIZE) -> bytes:
        return bytes(self.here.buffer[number * size : (number + 1) * size])

    def piece_there(self, number: int, size: int = SIZE) -> bytes:
        return bytes(self.there.buffer[number * size : (number + 1) * size])


@pytest.mark.parametrize("protection", list(Protection))
def test_bytes_come_behind_the_answer_where_the_asker_wants_them(
    open_tcp: Open, protection: Protection
) -> None:
    pair = Pair(open_tcp, protection=protection)
    for turn, chosen in enumerate(([3, 9, 4], list(range(NUM)), [], [5])):
        pair.here.buffer[:] = bytes(NUM * SIZE)
        pair.ask()
        asked = pair.hear()
        assert (asked.question, asked.whence) == (QUESTION, "127.0.0.1")
        assert asked.sender.roles == {CredentialRole.WORKER}
        pieces = Pieces([n * SIZE for n in chosen], SIZE)
        pair.owner.answer(asked.number, b"answer %d" % turn, pair.there, pieces)
        done = pair.ended()
        assert (done.error, done.answer) == (None, b"answer %d" % turn)
        assert (done.num_bytes, done.protocol) == (len(chosen) * SIZE, "tcp")
        for place, number in enumerate(chosen):
            assert pair.piece_here(NUM - 1 - place) == pair.piece_there(number)
        assert events(pair.owner) == [AskEnded(number=asked.number)]


@pytest.mark.parametrize("protection", list(Protection))
def test_a_question_to_which_no_bytes_come(open_tcp: Open, protection: Protection) -> None:
    pair = Pair(open_tcp, protection=protection)
    for turn in range(2):
        pair.ask(num_pieces=0)
        asked = pair.hear()
        assert (asked.question, asked.piece_bytes) == (QUESTION, 0)
        pair.owner.answer(asked.number, b"answer %d" % turn, pair.there, Pieces([], 0))
        done = pair.ended()
        assert (done.error, done.answer, done.num_bytes) == (None, b"answer %d" % turn, 0)
        assert events(pair.owner) == [AskEnded(number=asked.number)]
    pair.ask(num_pieces=0)
    pair.owner.answer(pair.hear().number, b"more", pair.there, Pieces([0], SIZE))
    assert pair.ended().error is not None, "the owner sends bytes that nobody wants"


@pytest.mark.parametrize("protection", list(Protection))
def test_question_answer_and_reason_are_readable_on_the_way_only_without_encryption(
    open_tcp: Open, protection: Protection
) -> None:
    pair = Pair(open_tcp, protection=protection)
    there = pair.owner.segment
    relay = Relay(int(there.endpoints["tcp"].rpartition(":")[2]), records=True)
    endpoints = {**there.endpoints, "tcp": f"127.0.0.1:{relay.port}"}
    pair.segment = SegmentRef(there.engine_id, endpoints, there.host)
    pair.ask(num_pieces=1)
    pair.owner.answer(pair.hear().number, b"an answer of words", pair.there, Pieces([], 0))
    assert pair.ended().answer == b"an answer of words"
    assert isinstance(events(pair.owner)[0], AskEnded)
    pair.ask(num_pieces=1)
    pair.owner.refuse(pair.hear().number, "for a reason")
    assert "for a reason" in (pair.ended().error or "")
    [passage] = relay.connections
    relay.close()
    readable = protection is not Protection.ENCRYPT
    assert (QUESTION in passage.sent) is readable
    assert (b"an answer of words" in passage.received) is readable
    assert (b"for a reason" in passage.received) is readable


def test_pieces_may_be_shorter_here_than_what_the_answer_names(open_tcp: Open) -> None:
    pair = Pair(open_tcp, protection=Protection.MAC)
    pair.ask(num_pieces=4, size=SIZE // 2)
    pair.owner.answer(pair.hear().number, b"yes", pair.there, Pieces([2 * SIZE], SIZE))
    assert pair.ended().num_bytes == SIZE
    for place in range(2):
        assert pair.piece_here(3 - place, SIZE // 2) == pair.piece_there(4 + place, SIZE // 2)


def test_a_question_can_be_refused_and_the_connection_goes_on(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    pair.ask()
    number = pair.hear().number
    pair.owner.refuse(number, "not today")
    pair.owner.refuse(number, "twice")
    pair.owner.answer(number, b"late", pair.there, Pieces([], SIZE))
    assert pair.ended().error == "owner refused: not today"
    assert events(pair.owner) == [AskEnded(number=number)]
    pair.ask()
    pair.owner.answer(pair.hear().number, b"yes", pair.there, Pieces([0], SIZE))
    assert pair.ended().error is None
    assert pair.owner.backends[0].num_connections == 1


def test_requests_behind_a_question_wait_for_its_answer(open_tcp: Open) -> None:
    """So the answers come in order. Two connections carry 64 READs and a question."""
    pair = Pair(open_tcp)
    pair.ask(num_pieces=1)
    number = pair.hear().number
    read = TransferOp(pair.here.region_id, 2 * SIZE, pair.there.region_id, 0, SIZE)
    batch = TransferBatch(op=Op.READ, peer=pair.owner.segment, ops=[read])
    for _ in range(64):
        pair.asker.submit(batch)
    pair.owner.answer(number, b"yes", pair.there, Pieces([0], SIZE))
    done: list[TransferDone] = []
    while len(done) < 65:
        done += pair.asker.wait(WAIT_S)
    assert [each.error for each in done] == [None] * 65


@pytest.mark.parametrize("pieces", [Pieces([NUM * SIZE], SIZE), Pieces([0], SIZE + 1)])
def test_an_answer_that_names_no_such_memory_ends_the_question(
    open_tcp: Open, pieces: Pieces
) -> None:
    pair = Pair(open_tcp)
    pair.ask()
    number = pair.hear().number
    pair.owner.answer(number, b"yes", pair.there, pieces)
    assert pair.ended().error is not None
    assert events(pair.owner)[0] == AskEnded(number=number)


def test_more_than_the_asker_has_room_for_breaks_the_connection(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    pair.ask(num_pieces=2)
    pair.owner.answer(pair.hear().number, b"yes", pair.there, Pieces([0, SIZE, 2 * SIZE], SIZE))
    assert "does not have the length that was asked for" in (pair.ended().error or "")
    assert pair.here.buffer[: 2 * SIZE] == bytes(2 * SIZE)


def test_a_question_ends_when_its_asker_hangs_up(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    pair.ask()
    number = pair.hear().number
    pair.asker.close()
    heard = [*events(pair.owner)]
    if len(heard) < 2:  # its thread tells one after the other
        heard += events(pair.owner)
    assert heard == [AskEnded(number=number), AskerLeft(asker=number)]
    pair.owner.answer(number, b"late", pair.there, Pieces([0], SIZE))
    assert not pair.owner.events()


def test_a_connection_that_asked_is_told_of_once_when_it_ends(open_tcp: Open) -> None:
    """Its number is the same in all its questions. One that has asked nothing is not told of."""
    pair = Pair(open_tcp)
    askers = []
    for _ in range(3):
        pair.ask(num_pieces=1)
        asked = pair.hear()
        askers.append(asked.asker)
        pair.owner.answer(asked.number, b"yes", pair.there, Pieces([0], SIZE))
        assert pair.ended().error is None
        assert events(pair.owner) == [AskEnded(number=asked.number)]
    other = open_tcp("other")
    region = other.allocate(SIZE, "here")
    op = TransferOp(region.region_id, 0, pair.there.region_id, 0, SIZE)
    other.submit(TransferBatch(op=Op.READ, peer=pair.owner.segment, ops=[op]))
    assert other.wait(WAIT_S)[0].error is None
    other.close()
    pair.asker.close()
    [asker] = set(askers)
    assert events(pair.owner) == [AskerLeft(asker=asker)]
    assert not pair.owner.events()


def test_a_question_is_asked_once_when_its_owner_goes(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    pair.ask()
    pair.hear()
    pair.owner.close()
    assert pair.ended().error is not None


def test_nothing_lands_for_a_question_that_was_given_up(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    batch_id = pair.ask()
    number = pair.hear().number
    pair.asker.cancel(batch_id)
    assert pair.ended().error == "cancelled"
    pair.owner.answer(number, b"late", pair.there, Pieces([0, SIZE], SIZE))
    assert events(pair.owner) == [AskEnded(number=number)]
    pair.ask(num_pieces=1)
    pair.owner.answer(pair.hear().number, b"yes", pair.there, Pieces([0], SIZE))
    assert pair.ended().error is None
    assert pair.here.buffer[SIZE:] == bytes((NUM - 1) * SIZE)


def test_a_pool_client_gets_only_what_it_was_lent(open_tcp: Open) -> None:
    pair = Pair(open_tcp, role=CredentialRole.POOL_CLIENT)
    pair.ask()
    asked = pair.hear()
    pair.owner.answer(asked.number, b"yes", pair.there, Pieces([0, SIZE], SIZE))
    assert "this client may not read this memory" in (pair.ended().error or "")
    assert events(pair.owner) == [AskEnded(number=asked.number)]
    pair.owner.lend(asked.sender.channel_key, pair.there, Pieces([0, SIZE], SIZE), write=False)
    pair.ask()
    asked = pair.hear()
    pair.owner.answer(asked.number, b"yes", pair.there, Pieces([0, SIZE], SIZE))
    assert pair.ended().num_bytes == 2 * SIZE
    assert events(pair.owner) == [AskEnded(number=asked.number)]


def test_only_one_that_hears_is_asked_and_only_over_tcp(open_tcp: Open) -> None:
    asker, deaf = open_tcp("asker"), open_tcp("deaf")
    near, hearing = (open_tcp(name, protocols=("shm", "tcp")) for name in ("near", "hearing"))
    hearing.hear_questions()
    assert asker.takes_questions(hearing.segment)
    assert not near.takes_questions(hearing.segment), "memory of this host is mapped"
    assert not asker.takes_questions(deaf.segment)
    region = asker.allocate(SIZE, "here")
    told = deaf.segment
    lies = SegmentRef(told.engine_id, {**told.endpoints, QUESTIONS: "tcp"}, told.host)
    op = TransferOp(region.region_id, 0, 0, 0, SIZE)
    for peer, error in (
        (told, "deaf takes no questions from here"),
        (lies, "deaf refused: questions are not heard here"),
    ):
        asker.submit(TransferBatch(op=Op.READ, peer=peer, ops=[op], question=QUESTION))
        [done] = asker.wait(WAIT_S)
        assert done.error == error


def test_pieces_of_two_sizes_cannot_be_asked_for(open_tcp: Open) -> None:
    pair = Pair(open_tcp)
    ops = [TransferOp(pair.here.region_id, n * SIZE, 0, 0, SIZE - n) for n in range(2)]
    pair.asker.submit(
        TransferBatch(op=Op.READ, peer=pair.owner.segment, ops=ops, question=QUESTION)
    )
    assert "must have one size" in (pair.ended().error or "")
