"""TCP when the other side, or what lies between, does not behave."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.errors import ConfigError
from mooncake.base.ids import SystemIds
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.control_link import pack_frame
from mooncake.transfer.net.endpoint import ListenAddress, Protection, parse_endpoint
from mooncake.transfer.net.handshake import ConnectingSide, Credentials
from mooncake.transfer.net.listener import MAX_UNPROVEN
from mooncake.transfer.net.seals import TAG_BYTES, Seals
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.tcp import wire
from mooncake.transfer.tcp.backend import PeerLimits, TcpBackend, TcpSettings
from mooncake.transfer.tcp.connection import ConnectionLimits
from mooncake.transfer.tcp.server import ServerLimits
from tests.support.transfer.driving import WAIT_S, move
from tests.support.transfer.rdma_engines import until

MIB = 2**20
SECRET = "secret"
RESET = struct.pack("ii", 1, 0)
Open = Callable[..., RoutedTransfer]


@pytest.fixture
def open_tcp() -> Iterator[Open]:
    opened: list[RoutedTransfer] = []

    def make(
        engine_id: str,
        settings: TcpSettings | None = None,
        protection: Protection | None = Protection.MAC,
    ) -> RoutedTransfer:
        config = TransferConfig(
            secret=SECRET,
            host="h",
            protocols=["tcp"],
            tcp=settings or TcpSettings(),
            protection=protection,
        )
        opened.append(open_transfer(config, engine_id, MonotonicClock()))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


class Proxy:
    """Forwards connections to `target`, cutting the first `num_cuts` after `cut_after` bytes, and
    altering one byte in each of the first `num_altered` after as many.
    """

    def __init__(self, target: str, num_cuts: int, cut_after: int, num_altered: int = 0) -> None:
        self.num_altered_left = num_altered
        self._target = parse_endpoint(target)
        self._cut_after = cut_after
        self._lock = threading.Lock()
        self.num_cuts_left = num_cuts
        self.num_connections = 0
        self.seen: list[bytes] | None = None
        """All that has passed, when it is a list."""
        self.hung_up = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._target)
            pair = (near, far)
            left = [self._cut_after]
            for source, target in (pair, pair[::-1]):
                threading.Thread(
                    target=self._forward, args=(source, target, left), daemon=True
                ).start()

    def _forward(self, source: socket.socket, target: socket.socket, left: list[int]) -> None:
        altered = False
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                left[0] -= len(data)
                if self.seen is not None:
                    self.seen.append(data)
                with self._lock:
                    cut = left[0] < 0 and self.num_cuts_left > 0
                    self.num_cuts_left -= cut
                if cut:
                    for sock in (source, target):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    break
                with self._lock:
                    alter = left[0] < 0 and self.num_altered_left > 0 and not altered
                    self.num_altered_left -= alter
                if alter:
                    altered = True
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.hung_up.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_slices_of_a_broken_stream_go_again(open_tcp: Open, op: Op) -> None:
    owner, us = open_tcp("owner"), open_tcp("us")
    theirs, ours = owner.allocate(24 * MIB, "theirs"), us.allocate(24 * MIB, "ours")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    source.buffer[:] = os.urandom(source.num_bytes)
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=2, cut_after=5 * MIB)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, 24 * MIB)
    assert move(us, op, through, [one]).error is None
    assert proxy.num_cuts_left == 0
    assert target.buffer == source.buffer
    [link] = [link for link in us.links() if link.protocol == "tcp"]
    assert (link.protocol, link.nic, link.peer) == ("tcp", "127.0.0.1", "owner")
    assert link.num_bytes == 24 * MIB, "what went again counts once"
    assert link.num_slices == sum(link.latency_buckets)
    # One stream may have been cut both ways.
    assert link.num_failures in (1, 2)
    assert link.num_retries >= link.num_failures
    us.close()
    owner.close()  # so that all is counted
    [served] = owner.links()
    assert (served.protocol, served.peer) == ("tcp_served", "us")
    assert served.num_bytes >= 24 * MIB, "the owner counts what it served, needed or not"
    proxy.close()


@pytest.mark.parametrize("after", [1000, 100_000, 3 * MIB])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("protection", [Protection.MAC, Protection.ENCRYPT])
def test_bytes_that_a_relay_alters_are_found_out_and_go_again(
    open_tcp: Open, protection: Protection, op: Op, after: int
) -> None:
    owner, us = open_tcp("owner", protection=protection), open_tcp("us", protection=protection)
    theirs, ours = owner.allocate(8 * MIB, "theirs"), us.allocate(8 * MIB, "ours")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    source.buffer[:] = os.urandom(source.num_bytes)
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=0, cut_after=after, num_altered=1)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8 * MIB)
    assert move(us, op, through, [one]).error is None
    assert proxy.num_altered_left == 0
    assert target.buffer == source.buffer
    proxy.num_altered_left = 10**6
    assert move(us, op, through, [one]).error is not None, "never taken for what was sent"
    proxy.close()


@pytest.mark.parametrize("protection", list(Protection))
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("sizes", [[7], [4096] * 1500, [3 * MIB + 1, 1, MIB, 70_000], [5 * MIB]])
def test_pieces_of_any_size_arrive_as_they_were_and_are_read_by_nobody(
    open_tcp: Open, protection: Protection, op: Op, sizes: list[int]
) -> None:
    owner, us = open_tcp("owner", protection=protection), open_tcp("us", protection=protection)
    words = b"a secret of sixteen words or so!"
    num_bytes = sum(sizes) + len(sizes)  # with gaps, so that pieces stay pieces
    theirs, ours = owner.allocate(num_bytes, "theirs"), us.allocate(num_bytes, "ours")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    source.buffer[:] = (words * (num_bytes // len(words) + 1))[:num_bytes]
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=0, cut_after=0)
    proxy.seen = []
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    ops, expected, start = [], bytearray(num_bytes), 0
    for size in sizes:
        ops.append(TransferOp(ours.region_id, start, theirs.region_id, start, size))
        expected[start : start + size] = source.buffer[start : start + size]
        start += size + 1
    assert move(us, op, through, ops).error is None
    assert target.buffer == expected
    passed = b"".join(proxy.seen)
    is_readable = any(words[at : at + 6] in passed for at in range(len(words) - 6))
    assert is_readable is (protection is not Protection.ENCRYPT)
    proxy.close()


def test_a_relay_cannot_lead_a_write_elsewhere(open_tcp: Open) -> None:
    owner = open_tcp("owner")
    theirs = owner.allocate(4096, "theirs")
    sock, seals = write_from(owner)
    with sock:
        head = wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 0, 16)], 16)
        moved = wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 64, 16)], 16)
        sock.sendall(moved + seals.seal(head)[-TAG_BYTES:] + b"\x07" * 16)
        assert hung_up(sock)
    assert not theirs.array.any()


@pytest.mark.parametrize("protection", list(Protection))
def test_the_owner_decides_on_the_protection(open_tcp: Open, protection: Protection) -> None:
    owner, us = open_tcp("owner", protection=protection), open_tcp("us", protection=None)
    theirs, ours = owner.allocate(MIB, "theirs"), us.allocate(MIB, "ours")
    theirs.buffer[:] = os.urandom(MIB)
    proxy = Proxy(owner.segment.endpoints["tcp"], 0, cut_after=5000, num_altered=1)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, MIB)
    assert move(us, Op.READ, through, [one]).error is None
    assert (ours.buffer == theirs.buffer) is (protection is not Protection.NONE)
    proxy.close()


@pytest.mark.parametrize("protection", list(Protection))
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_refused_request_says_why_and_the_next_is_served(
    open_tcp: Open, protection: Protection, op: Op
) -> None:
    owner, us = open_tcp("owner", protection=protection), open_tcp("us", protection=None)
    theirs, ours = owner.allocate(3 * MIB, "theirs"), us.allocate(3 * MIB, "ours")
    at = [TransferOp(ours.region_id, 0, theirs.region_id + gone, 0, 3 * MIB) for gone in (0, 7)]
    for one, is_refused in ((at[0], False), (at[1], True), (at[0], False)):
        error = move(us, op, owner.segment, [one]).error
        assert ("is not registered" in (error or "")) is is_refused
    assert us.counters()["transfer_tcp_failures"] == 0, "the stream went on"


def test_bytes_are_encrypted_if_only_the_client_wants_it(open_tcp: Open) -> None:
    owner, us = open_tcp("owner", protection=None), open_tcp("us", protection=Protection.ENCRYPT)
    theirs, ours = owner.allocate(MIB, "theirs"), us.allocate(MIB, "ours")
    theirs.buffer[:] = b"secret!!" * (MIB // 8)
    proxy = Proxy(owner.segment.endpoints["tcp"], 0, cut_after=MIB)
    proxy.seen = []
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, MIB)
    assert move(us, Op.READ, through, [one]).error is None
    assert ours.buffer == theirs.buffer
    assert sum(map(len, proxy.seen)) > MIB
    assert b"secret" not in b"".join(proxy.seen)
    proxy.close()


def test_bytes_are_sealed_unless_only_this_machine_can_connect() -> None:
    assert ListenAddress().is_loopback
    assert ListenAddress("::1").is_loopback
    assert not ListenAddress("0.0.0.0").is_loopback
    assert not ListenAddress("127.0.0.1", "10.0.0.7").is_loopback
    assert not ListenAddress("node7").is_loopback


def test_a_stream_that_always_breaks_fails_the_batch(open_tcp: Open) -> None:
    owner, us = open_tcp("owner"), open_tcp("us")
    theirs, ours = owner.allocate(8 * MIB, "theirs"), us.allocate(8 * MIB, "ours")
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=10**6, cut_after=MIB)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8 * MIB)
    for op in (Op.READ, Op.WRITE):
        error = move(us, op, through, [one]).error
        assert error is not None
        assert error.startswith("owner: ")
    proxy.close()
    direct = move(us, Op.WRITE, owner.segment, [one])
    assert direct.error is None


def impatient(**limits: float) -> TcpSettings:
    connection = ConnectionLimits(**limits)  # type: ignore[arg-type]  # seconds only
    return TcpSettings(peer=PeerLimits(connection=connection, fence_s=0.05, num_failures=1))


def test_a_peer_that_never_shakes_hands_is_given_up(open_tcp: Open) -> None:
    us = open_tcp("us", impatient(connect_s=0.1))
    ours = us.allocate(4096, "ours")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = SegmentRef("mute", {"tcp": f"127.0.0.1:{silent.getsockname()[1]}"}, "h")
        done = move(us, Op.READ, place, [TransferOp(ours.region_id, 0, 1, 0, 8)])
    assert done.error == "mute: the peer does not answer"


class FakeOwner:
    """Shakes hands as an owner does, then answers a request with a sealed header and `payload`."""

    def __init__(self, header: bytes, payload: bytes = b"") -> None:
        self._header = header
        self._payload = payload
        self._listener = socket.create_server(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.segment = SegmentRef("fake", {"tcp": endpoint}, "h")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    side = Credentials(
                        engine_id="fake",
                        credential=own_credential(SECRET, CredentialRole.WORKER),
                        ids=SystemIds(),
                    ).accept()
                    while side.identity is None:
                        sock.sendall(pack_frame(side.step(read_message(sock))))
                    sock.recv(wire.HEAD_BYTES + TAG_BYTES, socket.MSG_WAITALL)
                    assert side.channel is not None
                    if self._header:
                        sock.sendall(side.channel.sent.seal(self._header) + self._payload)
                    while sock.recv(65536):
                        pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def read_message(sock: socket.socket) -> bytes:
    length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    return sock.recv(length, socket.MSG_WAITALL) if length else b""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"\xff" * wire.HEADER_BYTES, "not a transfer frame"),
        (wire.pack_header(wire.Header(wire.READ, 0, 1, 0)), "unexpected transfer frame"),
        (wire.pack_header(wire.Header(wire.DATA, 0, 7, 8)), "request that was not made"),
        (wire.pack_header(wire.Header(wire.DONE, 0, 1, 0)), "of another kind than the request"),
        (
            wire.pack_header(wire.Header(wire.DATA, 0, 1, 9)),
            "does not have the length that was asked for",
        ),
        (b"", "no progress for 0 s"),
        (wire.pack_header(wire.Header(wire.DATA, 0, 1, 8)) + b"half", "no progress"),
    ],
)
def test_an_owner_that_answers_nonsense_or_nothing_fails_the_batch(
    open_tcp: Open, answer: bytes, words: str
) -> None:
    fake, us = (
        FakeOwner(answer[: wire.HEADER_BYTES], answer[wire.HEADER_BYTES :]),
        open_tcp("us", impatient(stall_s=0.2)),
    )
    ours = us.allocate(4096, "ours")
    done = move(us, Op.READ, fake.segment, [TransferOp(ours.region_id, 0, 1, 0, 8)])
    assert done.error is not None
    assert words.removesuffix(" for 0 s") in done.error
    fake.close()


def test_an_idle_stream_is_closed_and_opened_again(open_tcp: Open) -> None:
    owner, us = open_tcp("owner"), open_tcp("us", impatient(idle_s=0.1))
    theirs, ours = owner.allocate(4096, "theirs"), us.allocate(4096, "ours")
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, 4096)
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=0, cut_after=0)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    assert move(us, Op.WRITE, through, [one]).error is None
    assert proxy.hung_up.wait(WAIT_S)
    assert move(us, Op.WRITE, through, [one]).error is None
    assert proxy.num_connections == 2
    proxy.close()


# ------------------------------------------------------------- hostile clients


def connect(owner: RoutedTransfer) -> socket.socket:
    sock = socket.create_connection(parse_endpoint(owner.segment.endpoints["tcp"]))
    sock.settimeout(WAIT_S)
    return sock


def client(role: CredentialRole = CredentialRole.WORKER) -> Credentials:
    """Return what an engine with the id "client" proves, with keys of its own."""
    return Credentials(engine_id="client", credential=own_credential(SECRET, role), ids=SystemIds())


def shake(
    owner: RoutedTransfer, credentials: Credentials, fenced: Sequence[str] = ()
) -> tuple[socket.socket, ConnectingSide]:
    """Connect and shake hands; have the earlier connections `fenced` end."""
    sock, side = connect(owner), credentials.connect("owner", fenced)
    message: bytes | None = side.first_message
    while message is not None:
        sock.sendall(pack_frame(message))
        message = side.step(read_message(sock))
    return sock, side


def write_from(owner: RoutedTransfer) -> tuple[socket.socket, Seals]:
    """Connect and shake hands with the right secret; return also what seals requests."""
    sock, side = shake(owner, client())
    assert side.channel is not None
    return sock, side.channel.sent


def hung_up(sock: socket.socket) -> bool:
    """Whether the owner closes the connection (rather than answering, or waiting for more)."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4),
        (2**31).to_bytes(4, "little"),
        random.Random(1).randbytes(64),
        wire.pack_request(wire.READ, 1, [TransferOp(0, 0, 1, 0, 16)], 16),
    ],
)
def test_without_a_handshake_nothing_is_answered_but_a_refusal(open_tcp: Open, data: bytes) -> None:
    owner = open_tcp("owner")
    theirs = owner.allocate(4096, "theirs")
    theirs.buffer[:16] = b"nobody sees this"
    with connect(owner) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(OSError):
            while chunk := sock.recv(4096):
                got += chunk
    assert b"nobody" not in got
    sock, seals = write_from(owner)
    with sock:
        sock.sendall(seals.seal(wire.pack_request(wire.READ, 1, [TransferOp(0, 0, 1, 0, 16)], 16)))
        answer = sock.recv(wire.HEADER_BYTES + TAG_BYTES + 16, socket.MSG_WAITALL)
        assert answer[wire.HEADER_BYTES + TAG_BYTES :] == b"nobody sees this"


@pytest.mark.parametrize(
    "data",
    [
        random.Random(2).randbytes(wire.HEAD_BYTES),
        wire.pack_header(wire.Header(wire.DONE, 0, 1, 0)) + bytes(wire.RANGE_BYTES),
        wire.pack_header(wire.Header(wire.WRITE, 0, 1, 100)) + bytes(wire.RANGE_BYTES),
        wire.pack_header(wire.Header(wire.READ, wire.MAX_RANGES + 1, 1, 100)) + bytes(100),
        wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 0, 16)], 17),
        wire.pack_request(wire.READ, 1, [TransferOp(0, 0, 1, 0, 16)], 2**29),
        wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 0, 0)], 0),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_cut_off(open_tcp: Open, data: bytes) -> None:
    owner = open_tcp("owner")
    theirs = owner.allocate(4096, "theirs")
    sock, seals = write_from(owner)
    with sock:
        sock.sendall(seals.seal(data))
        assert hung_up(sock)
    assert not theirs.array.any()


def test_a_client_that_does_not_wait_until_it_is_let_in_is_cut_off(open_tcp: Open) -> None:
    """Bytes that come with its proof would be lost when the socket changes hands."""
    owner = open_tcp("owner")
    side = client().connect("owner")
    with connect(owner) as sock:
        sock.sendall(pack_frame(side.first_message))
        proof = side.step(read_message(sock))
        assert proof is not None
        sock.sendall(pack_frame(proof) + bytes(wire.HEAD_BYTES))
        assert side.step(read_message(sock)) is None
        assert hung_up(sock)


def test_a_client_that_hangs_up_in_mid_write_applies_no_more(open_tcp: Open) -> None:
    """What an engine has given up must not reach memory from a socket's buffer later."""
    owner, us = open_tcp("owner"), open_tcp("us")
    theirs, ours = owner.allocate(4096, "theirs"), us.allocate(4096, "ours")
    sock, seals = write_from(owner)
    with sock:
        head = wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 0, 4096)], 4096)
        sock.sendall(seals.seal(head))
        sock.sendall(b"\x07" * 1000)
    one = TransferOp(ours.region_id, 0, theirs.region_id, 0, 4096)
    assert move(us, Op.WRITE, owner.segment, [one]).error is None
    assert not theirs.array.any()


def test_a_fenced_connection_applies_no_more(open_tcp: Open) -> None:
    owner = open_tcp("owner")
    theirs = owner.allocate(4096, "theirs")
    credentials = client()
    old, side = shake(owner, credentials)
    assert side.channel is not None
    head = wire.pack_request(wire.WRITE, 1, [TransferOp(0, 0, 1, 0, 4096)], 4096)
    old.sendall(side.channel.sent.seal(head))
    new, _ = shake(owner, credentials, [side.hello.connection_id])
    with contextlib.suppress(OSError):
        old.sendall(b"\x07" * 4096)
    assert hung_up(old)
    assert not theirs.array.any()
    old.close()
    new.close()


@pytest.mark.parametrize("role", [CredentialRole.WORKER, CredentialRole.POOL_CLIENT])
def test_nobody_ends_the_connections_of_others_by_their_names(
    open_tcp: Open, role: CredentialRole
) -> None:
    """Names of engines and connections travel in clear: who reads them can say that they are his,
    but has not the keys that opened them.
    """
    owner = open_tcp("owner")
    owner.allocate(4096, "theirs").buffer[:4] = b"here"
    sock, side = shake(owner, client())
    assert side.channel is not None
    with sock:
        foreign, _ = shake(owner, client(role), [side.hello.connection_id])
        head = wire.pack_request(wire.READ, 1, [TransferOp(0, 0, 1, 0, 4)], 4)
        sock.sendall(side.channel.sent.seal(head))
        answer = sock.recv(wire.HEADER_BYTES + TAG_BYTES + 4, socket.MSG_WAITALL)
        assert answer.endswith(b"here")
        foreign.close()


def test_an_unproven_connection_is_closed_in_time_and_too_many_are_refused(open_tcp: Open) -> None:
    limits = ServerLimits(num_connections=2, handshake_s=0.1)
    owner = open_tcp("owner", TcpSettings(server=limits))
    with connect(owner) as first, connect(owner) as second, connect(owner) as third:
        assert hung_up(third)
        assert hung_up(first)
        assert hung_up(second)


def test_a_flood_of_strangers_keeps_no_peer_out(open_tcp: Open) -> None:
    num_strangers = 2 * MAX_UNPROVEN
    limits = ServerLimits(num_connections=num_strangers - 10, handshake_s=60.0)
    owner, us = open_tcp("owner", TcpSettings(server=limits)), open_tcp("us")
    ours, theirs = us.allocate(8, "ours"), owner.allocate(8, "theirs")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)
    with contextlib.ExitStack() as strangers:
        for _ in range(num_strangers):
            strangers.enter_context(connect(owner))
        assert move(us, Op.READ, owner.segment, [op]).error is None
        (backend,) = owner.backends
        assert isinstance(backend, TcpBackend)
        until(
            lambda: backend.num_connections <= MAX_UNPROVEN + 1, lambda: threading.Event().wait(0)
        )
        for _ in range(num_strangers):
            strangers.enter_context(connect(owner))
        assert move(us, Op.READ, owner.segment, [op]).error is None
    assert us.counters()["transfer_tcp_failures"] == 0, "a proven client stays"


def test_endpoints_and_bad_settings(open_tcp: Open) -> None:
    assert parse_endpoint("10.0.0.7:4301") == ("10.0.0.7", 4301)
    assert parse_endpoint("[::1]:4301") == ("::1", 4301)
    for bad in ["", "10.0.0.7", ":80", "host:port", "host:-1"]:
        with pytest.raises(ConfigError, match="not a TCP endpoint"):
            parse_endpoint(bad)
    named = open_tcp("named", TcpSettings(listen=ListenAddress(advertise_host="192.0.2.7")))
    assert named.segment.endpoints["tcp"].startswith("192.0.2.7:")


def test_engines_take_ports_of_a_range_one_after_another(open_tcp: Open) -> None:
    first = parse_endpoint(open_tcp("any").segment.endpoints["tcp"])[1]
    among = TcpSettings(listen=ListenAddress(ports=(first, first + 9)))
    found = [parse_endpoint(open_tcp(n, among).segment.endpoints["tcp"])[1] for n in "ab"]
    assert first < found[0] < found[1] <= first + 9
    full = TcpSettings(listen=ListenAddress(ports=(first, first)))
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{first}-{first}"):
        open_tcp("c", full)


def test_a_failed_start_leaves_no_thread_and_no_descriptor_behind(open_tcp: Open) -> None:
    # Forwarding threads of earlier tests may end meanwhile: look at what is an engine's only.
    def ours() -> tuple[list[str], list[str]]:
        threads = [thread.name for thread in threading.enumerate() if "transfer" in thread.name]
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        kinds = [os.readlink(link) for link in links if os.path.lexists(link)]
        return threads, sorted(kind for kind in kinds if "event" in kind)

    before = ours()
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        open_tcp("nowhere", TcpSettings(listen=ListenAddress("203.0.113.1")))
    assert ours() == before
