"""Questions that bring bytes over TCP: the owner's machine chooses where they go, sums follow them,
and each question ends once, whatever becomes of either side. Nothing lands where it may not.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Iterator

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.ids import SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity import own_credential
from mooncake.transfer.engine import (
    MAX_ANSWER_BYTES,
    Asked,
    AskEnded,
    Brought,
    Op,
    Pieces,
    TransferBatch,
    TransferDone,
    TransferEvent,
    TransferOp,
)
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.blocking import shake_hands
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.tcp import wire
from tests.support.transfer.driving import WAIT_S, events

SIZE = 2**16
NUM = 16
QUESTION = b"where do these go? there are some of them"
NONE = Pieces([], SIZE)


class Pair:
    """An engine that brings bytes and one that hears."""

    def __init__(
        self,
        protection: Protection = Protection.NONE,
        role: CredentialRole = CredentialRole.WORKER,
        num: int = NUM,
    ) -> None:
        self.asker = self._open("asker", protection, role)
        self.owner = self._open("owner", protection, CredentialRole.WORKER)
        self.here = self.asker.allocate(num * SIZE, "here")
        self.there = self.owner.allocate(num * SIZE, "there")
        self.here.buffer[:] = random.Random(1).randbytes(num * SIZE)
        self.owner.guard(self.there)
        self.owner.hear_questions()
        self.grant = self.owner.grant()

    @staticmethod
    def _open(name: str, protection: Protection, role: CredentialRole) -> RoutedTransfer:
        config = TransferConfig(
            secret="secret", host="h", protocols=["tcp"], protection=protection, roles=[role]
        )
        return open_transfer(config, name, MonotonicClock())

    def bring(self, num_pieces: int = NUM, size: int = SIZE) -> int:
        """Bring pieces, the last one of the memory here first; the sum of each is its number."""
        ops = [
            TransferOp(self.here.region_id, (num_pieces - 1 - n) * size, 0, 0, size)
            for n in range(num_pieces)
        ]
        return self.asker.submit(TransferBatch(
            op=Op.WRITE, peer=self.owner.segment, ops=ops, question=QUESTION,
            sums=lambda: list(range(num_pieces)),
        ))  # fmt: skip

    def next(self) -> TransferEvent:
        [event] = events(self.owner)
        return event

    def hear(self) -> Asked:
        event = self.next()
        assert isinstance(event, Asked)
        return event

    def take(self, number: int, offsets: list[int | None], grant: int | None = None) -> None:
        grant = self.grant if grant is None else grant
        self.owner.take(number, self.there, offsets, grant)

    def ended(self) -> TransferDone:
        [done] = self.asker.wait(WAIT_S)
        return done

    def piece_here(self, number: int) -> bytes:
        return bytes(self.here.buffer[number * SIZE : (number + 1) * SIZE])

    def piece_there(self, number: int) -> bytes:
        return bytes(self.there.buffer[number * SIZE : (number + 1) * SIZE])

    def close(self) -> None:
        for engine in (self.asker, self.owner):
            engine.close()
            engine.check_integrity()


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened = Pair()
    yield opened
    opened.close()


@pytest.fixture(params=[Protection.NONE, Protection.MAC])
def proven(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(request.param)
    yield opened
    opened.close()


def test_bytes_land_where_the_owner_wants_them_and_it_answers(proven: Pair) -> None:
    for turn, places in enumerate(
        ([*range(NUM)], [None] * NUM, [3, *[None] * (NUM - 2), 0], [None, *range(1, NUM)])
    ):
        proven.there.buffer[:] = bytes(NUM * SIZE)
        proven.bring()
        asked = proven.hear()
        assert (asked.question, asked.whence) == (QUESTION, "127.0.0.1")
        assert (asked.num_pieces, asked.num_bytes) == (NUM, NUM * SIZE)
        proven.take(asked.number, [None if n is None else n * SIZE for n in places])
        assert proven.next() == Brought(number=asked.number, sums=list(range(NUM)))
        landed = {to: NUM - 1 - n for n, to in enumerate(places) if to is not None}
        for number in range(NUM):
            wanted = proven.piece_here(landed[number]) if number in landed else bytes(SIZE)
            assert proven.piece_there(number) == wanted
        proven.owner.answer(asked.number, b"answer %d" % turn, proven.there, NONE)
        done = proven.ended()
        assert (done.error, done.answer) == (None, b"answer %d" % turn)
        assert (done.num_bytes, done.protocol) == (NUM * SIZE, "tcp")
        assert proven.next() == AskEnded(number=asked.number)
    assert proven.owner.backends[0].num_connections == 1  # type: ignore[attr-defined]


def test_as_much_as_may_follow_a_question_goes_in_one() -> None:
    pair = Pair(Protection.MAC, num=MAX_ANSWER_BYTES // SIZE)
    pair.bring(num_pieces=1, size=MAX_ANSWER_BYTES)
    number = pair.hear().number
    pair.take(number, [0])
    assert pair.next() == Brought(number=number, sums=[0])
    pair.owner.answer(number, b"yes", pair.there, NONE)
    assert pair.ended().error is None
    assert pair.there.buffer == pair.here.buffer
    pair.close()


def test_a_question_that_is_refused_leaves_the_connection_whole(proven: Pair) -> None:
    proven.bring()
    number = proven.hear().number
    proven.owner.refuse(number, "not today")
    proven.owner.refuse(number, "twice")
    assert proven.ended().error == "owner refused: not today"
    assert proven.next() == AskEnded(number=number)
    proven.bring(num_pieces=2)
    number = proven.hear().number
    proven.take(number, [0, SIZE])
    assert isinstance(proven.next(), Brought)
    proven.owner.refuse(number, "too late for that")
    assert proven.ended().error == "owner refused: too late for that"
    assert proven.next() == AskEnded(number=number)
    assert proven.owner.backends[0].num_connections == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["no grant", "a revoked grant", "another region's place"])
def test_bytes_do_not_land_where_they_may_not(pair: Pair, how: str) -> None:
    grant, place = pair.grant, 0
    if how == "no grant":
        grant = 0
    elif how == "a revoked grant":
        pair.owner.revoke(grant)
    else:
        place = NUM * SIZE
    pair.bring(num_pieces=2)
    number = pair.hear().number
    pair.take(number, [SIZE, place], grant)
    assert "refused" in (pair.ended().error or "")
    assert pair.next() == AskEnded(number=number)
    assert pair.there.buffer == bytes(NUM * SIZE)


def test_a_pool_client_writes_only_where_it_was_lent_memory() -> None:
    pair = Pair(role=CredentialRole.POOL_CLIENT)
    pair.bring(num_pieces=2)
    asked = pair.hear()
    pair.take(asked.number, [0, SIZE])
    assert "may not write this memory" in (pair.ended().error or "")
    assert pair.next() == AskEnded(number=asked.number)
    pair.owner.lend(asked.sender.channel_key, pair.there, Pieces([0, SIZE], SIZE), write=True)
    pair.bring(num_pieces=2)
    asked = pair.hear()
    pair.take(asked.number, [0, SIZE])
    assert isinstance(pair.next(), Brought)
    pair.owner.answer(asked.number, b"yes", pair.there, NONE)
    assert pair.ended().error is None
    assert pair.next() == AskEnded(number=asked.number)
    pair.close()


def test_a_number_of_places_that_does_not_fit_breaks_the_connection(pair: Pair) -> None:
    pair.bring(num_pieces=2)
    number = pair.hear().number
    pair.take(number, [0])
    assert pair.ended().error is not None
    assert pair.next() == AskEnded(number=number)


def test_an_answer_before_the_bytes_were_taken_breaks_the_connection(pair: Pair) -> None:
    pair.bring(num_pieces=2)
    number = pair.hear().number
    pair.owner.answer(number, b"yes", pair.there, NONE)
    assert pair.ended().error is not None
    assert pair.next() == AskEnded(number=number)


def test_a_question_is_asked_once_when_its_owner_goes(pair: Pair) -> None:
    pair.bring()
    pair.hear()
    pair.owner.close()
    assert pair.ended().error is not None


def test_a_question_ends_when_its_asker_hangs_up(pair: Pair) -> None:
    pair.bring()
    number = pair.hear().number
    pair.asker.close()
    assert pair.next() == AskEnded(number=number)
    pair.take(number, [0] * NUM)
    assert not pair.owner.events()
    assert pair.there.buffer == bytes(NUM * SIZE)


def test_a_question_that_was_given_up_ends_at_both_sides(pair: Pair) -> None:
    batch_id = pair.bring()
    number = pair.hear().number
    pair.asker.cancel(batch_id)
    assert pair.ended().error is not None
    assert pair.next() == AskEnded(number=number)
    pair.bring(num_pieces=1)
    number = pair.hear().number
    pair.take(number, [0])
    assert isinstance(pair.next(), Brought)
    pair.owner.answer(number, b"yes", pair.there, NONE)
    assert pair.ended().error is None


class Raw:
    """A proven connection that sends what it likes."""

    def __init__(self, pair: Pair) -> None:
        host, _, port = pair.owner.segment.endpoints["tcp"].rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=WAIT_S)
        visitor = Credentials(
            engine_id="raw", credential=own_credential("secret", CredentialRole.WORKER),
            ids=SystemIds(),
        )  # fmt: skip
        shake_hands(self.sock, visitor.connect("owner"), time.monotonic() + WAIT_S)
        self.sock.settimeout(WAIT_S)

    def is_hung_up_on(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize(
    ("num_pieces", "num_bytes", "question_bytes"),
    [
        (0, SIZE, 64), (3, SIZE, 64), (1025, 1025 * 8, 64), (1, 0, 64),
        (1, MAX_ANSWER_BYTES + 1, 64), (1, 2**40, 64), (1, SIZE, 0), (1, SIZE, 2**16 + 1),
        (1, SIZE, 2**40),
    ],
)  # fmt: skip
def test_sizes_out_of_bounds_are_hung_up_on_before_anything_is_heard(
    pair: Pair, num_pieces: int, num_bytes: int, question_bytes: int
) -> None:
    raw = Raw(pair)
    header = wire.Header(wire.OFFER, num_pieces, 1, num_bytes, question_bytes)
    raw.sock.sendall(wire.pack_header(header) + bytes(wire.RANGE_BYTES))
    assert raw.is_hung_up_on()
    assert not pair.owner.events()
    raw.sock.close()


@pytest.mark.parametrize("sent", [0, SIZE // 2, 2 * SIZE, 2 * SIZE + 8])
def test_an_asker_that_is_cut_off_in_mid_question_brought_nothing(pair: Pair, sent: int) -> None:
    """Not before it has sent all of its pieces, and their sums."""
    raw = Raw(pair)
    raw.sock.sendall(wire.pack_offer(1, QUESTION, 2, 2 * SIZE) + bytes([7]) * sent)
    number = pair.hear().number
    pair.take(number, [0, SIZE])
    raw.sock.close()
    assert pair.next() == AskEnded(number=number)
    pair.owner.answer(number, b"late", pair.there, NONE)
    assert not pair.owner.events()


def test_a_grant_that_ends_while_bytes_come_stops_them(pair: Pair) -> None:
    raw = Raw(pair)
    raw.sock.sendall(wire.pack_offer(1, QUESTION, 2, 2 * SIZE) + bytes([7]) * SIZE)
    number = pair.hear().number
    pair.take(number, [0, SIZE])
    while pair.there.buffer[SIZE - 1] != 7:
        select.select([], [], [], 0.001)
    pair.owner.revoke(pair.grant)
    raw.sock.sendall(bytes([8]) * SIZE + wire.pack_sums([0, 0]))
    head = raw.sock.recv(wire.HEADER_BYTES, socket.MSG_WAITALL)
    header = wire.parse_header(memoryview(head), frozenset((wire.REFUSED,)))
    assert header.request_id == 1
    assert pair.next() == AskEnded(number=number)
    assert 8 not in bytes(pair.there.buffer)
    raw.sock.close()
