"""Streams of small frames: whose other host is gone, what is too much, what ends them."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator

import pytest

from mooncake.transfer.net.control_link import MAX_FRAME_BYTES, ControlLink
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.regions import Gates
from tests.support.transfer.driving import WAIT_S


class Ends:
    """A link in a loop, and the plain socket at its other end."""

    def __init__(self, loop: IoLoop) -> None:
        self.frames: queue.Queue[bytes] = queue.Queue()
        self.endings: queue.Queue[str] = queue.Queue()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname(), timeout=WAIT_S)
            self.sock, _ = server.accept()
        self.sock.setblocking(False)
        made: queue.Queue[ControlLink] = queue.Queue()
        loop.post(lambda: made.put(ControlLink(loop, self.sock, self.frames.put, self.endings.put)))
        self.link = made.get(timeout=WAIT_S)


@pytest.fixture
def ends() -> Iterator[Ends]:
    loop = IoLoop(Gates(), "loop")
    made = Ends(loop)
    yield made
    made.peer.close()
    loop.post(made.link.close)
    loop.close()


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_frames_come_whole_however_they_are_cut(ends: Ends) -> None:
    bodies = [b"a", b"b" * 70, b"c" * MAX_FRAME_BYTES, b"d"]
    data = b"".join(map(frame, bodies))
    for at in range(0, len(data), 4099):
        ends.peer.sendall(data[at : at + 4099])
    assert [ends.frames.get(timeout=WAIT_S) for _ in bodies] == bodies


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_of_no_or_too_great_length_ends_it(ends: Ends, length: int) -> None:
    ends.peer.sendall(length.to_bytes(4, "little") + b"x")
    assert "does not speak this protocol" in ends.endings.get(timeout=WAIT_S)
    assert ends.frames.empty()


def test_a_host_that_is_gone_without_a_word_is_found_out(ends: Ends) -> None:
    """A host that lost power does not hang up: its queue pairs and sessions would stay."""
    tcp = socket.IPPROTO_TCP
    assert ends.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle_s, interval_s = (
        ends.sock.getsockopt(tcp, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
    )
    count = ends.sock.getsockopt(tcp, socket.TCP_KEEPCNT)
    assert idle_s + count * interval_s <= 30, "while nothing is said"
    assert 0 < ends.sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) <= 30_000, "while something is"


def test_a_sender_learns_of_a_dead_link_only_after_send_returns(ends: Ends) -> None:
    """Not within `send`: what it is in the middle of would be ended under its feet."""
    ends.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    told: queue.Queue[bool] = queue.Queue()

    def send_and_look() -> None:
        ends.peer.close()
        for _ in range(3):
            ends.link.send(b"in vain")
        told.put(ends.endings.empty())

    ends.link._loop.post(send_and_look)
    assert told.get(timeout=WAIT_S)
    assert ends.endings.get(timeout=WAIT_S)
    turned: queue.Queue[bool] = queue.Queue()
    ends.link._loop.post(lambda: turned.put(True))
    assert turned.get(timeout=WAIT_S)
    assert ends.endings.empty(), "told once"
