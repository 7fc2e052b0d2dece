"""Frames that bring bytes behind a question: pieces that nobody wants are dropped, the last message
is made when the payload is out, and both ends go on with the next frame.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.seals import KEY_BYTES, Seals
from mooncake.transfer.tcp.frames import Incoming, Outgoing

PIECES = [random.Random(n).randbytes(3000) for n in range(4)]
LENGTHS = [len(piece) for piece in PIECES]
SPARE = memoryview(bytearray(1024))
"""Shorter than a piece, so that one goes there in parts."""
HEAD, LAST = b"head" * 8, b"last" * 8


@pytest.fixture(params=[Protection.NONE, Protection.MAC])
def seals(request: pytest.FixtureRequest) -> tuple[Seals, Seals]:
    """What seals at one end and opens at the other."""
    key = bytes(KEY_BYTES)
    return Seals(request.param, key), Seals(request.param, key)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def send(frame: Outgoing, sock: socket.socket) -> None:
    while not frame.is_sent:
        frame.advance(sock.sendmsg(frame.views()))


def receive(payload: Incoming, sock: socket.socket) -> None:
    while payload.num_left:
        assert payload.receive(sock)


def take(sock: socket.socket, num_bytes: int) -> bytes:
    return sock.recv(num_bytes, socket.MSG_WAITALL)


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (1, 3), (0,), ()])
def test_wanted_pieces_arrive_and_the_others_are_dropped(
    ends: tuple[socket.socket, socket.socket], seals: tuple[Seals, Seals], wanted: tuple[int, ...]
) -> None:
    (ours, theirs), (seal, opening) = ends, seals
    made: list[int] = []

    def last() -> bytes:
        made.append(1)
        return LAST

    for _ in range(2):
        frame = Outgoing([HEAD], [memoryview(piece) for piece in PIECES], seal, last)
        frame.views()
        assert not made, "the last message is made when the payload is out"
        send(frame, ours)
        assert opening.open(take(theirs, len(HEAD) + opening.num_tag_bytes)) == HEAD
        places = [memoryview(bytearray(3000)) if n in wanted else None for n in range(4)]
        payload = Incoming(places, LENGTHS, opening, SPARE)
        receive(payload, theirs)
        for piece, place in zip(PIECES, places, strict=True):
            assert place is None or place == piece
        assert opening.open(take(theirs, len(LAST) + opening.num_tag_bytes)) == LAST
        assert made == [1]
        made.clear()


def test_a_wanted_piece_behind_one_that_is_dropped_is_still_checked(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    (ours, theirs), key = ends, bytes(KEY_BYTES)
    frame = Outgoing(
        [HEAD], [memoryview(piece) for piece in PIECES], Seals(Protection.MAC, key), lambda: LAST
    )
    sent = bytearray()
    while not frame.is_sent:
        views = list(frame.views())
        sent += b"".join(views)
        frame.advance(sum(map(len, views)))
    sent[len(HEAD) + 16 + 3000 + 16 + 5] ^= 1
    ours.sendall(sent)
    opening = Seals(Protection.MAC, key)
    opening.open(take(theirs, len(HEAD) + 16))
    places = [None, memoryview(bytearray(3000)), None, None]
    payload = Incoming(places, LENGTHS, opening, SPARE)
    with pytest.raises(ProtocolError, match="altered"):
        receive(payload, theirs)
