"""The link of a rank on another machine: proven ends, hidden bytes, one end for both."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from mooncake.base import ConfigError, Forbidden, ProtocolError
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.ranks import rank_host, sealed_link
from mooncake.launch.worker.ranks.far_ranks import HOSTS_NAME, FarStages
from mooncake.launch.worker.ranks.rank_host import RankHost
from mooncake.launch.worker.ranks.sealed_link import SealedLink
from mooncake.transfer.net.handshake import HandshakeRefused
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAME = "ranks"
MINE, OTHER = (
    own_credential(secret, CredentialRole.WORKER, name="test") for secret in ("one", "another")
)


class Tapped(socket.socket):
    """A socket that keeps what is sent."""

    def __init__(self, of: socket.socket) -> None:
        super().__init__(fileno=of.detach())
        self.seen: list[bytes] = []

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        self.seen.append(bytes(data))
        super().sendall(data, flags)


@contextmanager
def linked() -> Iterator[tuple[SealedLink, SealedLink, list[bytes]]]:
    """Yield both ends of a link, and what passes from the first to the second."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as threads:
        accepted = threads.submit(lambda: SealedLink.accept(server.accept()[0], MINE, NAME))
        near = SealedLink.connect(server.getsockname(), MINE, NAME)
        far = accepted.result()
        near._socket = tapped = Tapped(near._socket)
        yield near, far, tapped.seen
        tapped.close()
        far._socket.close()


def test_bytes_arrive_as_they_were_and_nobody_reads_them() -> None:
    with linked() as (near, far, seen):
        for data in (b"the secret of the cluster", bytes(1 << 16)):
            near.send(data)
            assert far.receive() == data
            far.send(data[::-1])
            assert near.receive() == data[::-1]
        assert b"secret" not in b"".join(seen)
        near.hang_up()
        assert far.receive() == b""


def test_altered_and_repeated_bytes_are_found() -> None:
    with linked() as (near, far, seen):
        near.send(b"one")
        assert far.receive() == b"one"
        near._socket.sendall(seen[-1])
        with pytest.raises(ProtocolError, match="altered"):
            far.receive()


def test_who_is_not_of_the_cluster_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def accept() -> None:
            with server.accept()[0] as sock:
                SealedLink.accept(sock, MINE, NAME)

        accepted = threads.submit(accept)
        with pytest.raises(HandshakeRefused, match="wrong cluster secret"):
            SealedLink.connect(server.getsockname(), OTHER, NAME)
        with pytest.raises((Forbidden, EOFError, OSError)):
            accepted.result()


def test_who_proves_itself_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_link, "PROVE_S", 0.2)
    near, far = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        near.sendall((60_000).to_bytes(4, "little"))
        with contextlib.suppress(OSError):
            while not ended.wait(0.01):
                near.sendall(b"x")

    with near, far, ThreadPoolExecutor(1) as threads:
        trickling = threads.submit(trickle)
        try:
            with pytest.raises(TimeoutError):
                SealedLink.accept(far, MINE, NAME)
        finally:
            ended.set()
        trickling.result()


def test_connections_that_prove_nothing_take_no_place_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_host, "MAX_RANKS", 1)
    monkeypatch.setattr(RankHost, "_follow", lambda _, link, whence: link.send(b"followed"))
    host = RankHost("127.0.0.1", 0, MINE)
    running = threading.Thread(target=host.run)
    running.start()
    address = ("127.0.0.1", host.port)
    idle = [socket.create_connection(address) for _ in range(3)]
    link = SealedLink.connect(address, MINE, HOSTS_NAME)
    assert link.receive() == b"followed"
    host.close()
    running.join()
    for each in (*idle, link._socket):
        each.close()


def test_of_too_many_that_do_not_prove_themselves_the_oldest_is_hung_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_host, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(RankHost, "_follow", lambda _, link, whence: link.send(b"followed"))
    with listening_host() as host, contextlib.ExitStack() as opened:
        address = ("127.0.0.1", host.port)
        idle = [opened.enter_context(socket.create_connection(address)) for _ in range(3)]
        assert idle[0].recv(1) == b"", "the oldest is hung up"
        link = SealedLink.connect(address, MINE, HOSTS_NAME)
        opened.enter_context(link._socket)
        assert link.receive() == b"followed"
        assert idle[1].recv(1) == b""
        idle[2].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[2].recv(1)


def test_what_comes_at_one_end_leaves_at_the_other_until_one_is_gone() -> None:
    with linked() as (near, far, _):
        here, near_end = socket.socketpair()
        there, far_end = socket.socketpair()
        relays = [
            threading.Thread(target=link.relay, args=(end,))
            for link, end in ((near, near_end), (far, far_end))
        ]
        for relay in relays:
            relay.start()
        data = bytes(range(256)) * 2000
        sending = threading.Thread(target=here.sendall, args=(data,))
        sending.start()
        found = b""
        while len(found) < len(data):
            found += there.recv(1 << 20)
        assert found == data
        there.close()
        assert here.recv(1) == b""
        for thread in (sending, *relays):
            thread.join(LONG_S)
            assert not thread.is_alive()
        here.close()


def test_a_machine_without_ranks_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    far = FarStages((address,), "127.0.0.1", MINE)
    told = f"127.0.0.1:{address[1]} starts no rank .*`mooncake ranks"
    with pytest.raises(ConfigError, match=told):
        far.start(0)


@contextmanager
def listening_host() -> Iterator[RankHost]:
    """Run a host of ranks."""
    host = RankHost("127.0.0.1", 0, MINE)
    thread = threading.Thread(target=host.run)
    thread.start()
    yield host
    host.close()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_host_of_ranks_is_greeted_and_probed_without_a_word_in_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listening_host() as host:
        address = "127.0.0.1", host.port
        FarStages((address, address), "127.0.0.1", MINE).greet()
        socket.create_connection(address).close()
        with pytest.raises(Forbidden, match=f"stage-hosts: 127.0.0.1:{host.port}: .*secret"):
            FarStages((address,), "127.0.0.1", OTHER).greet()
    host.finish(LONG_S)
    said = [one.getMessage() for one in caplog.records if one.name != "mooncake.audit"]
    assert all("refused" in line for line in said), caplog.text
    with pytest.raises(OSError, match=f"127.0.0.1:{host.port} does not answer"):
        FarStages((address,), "127.0.0.1", MINE).greet()


def test_only_who_does_not_prove_himself_is_written_into_the_audit_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that does not start, or a link that breaks, is nobody's failed proof."""
    written: list[str] = []
    told: queue.Queue[str] = queue.Queue()

    def fail(_: RankHost, link: SealedLink, whence: str) -> None:
        raise OSError("no rank starts")

    monkeypatch.setattr(RankHost, "_follow", fail)
    monkeypatch.setattr(rank_host, "audit", lambda event, **facts: written.append(facts["reason"]))
    monkeypatch.setattr(rank_host._log, "warning", lambda text, *of: told.put(text % of))
    with listening_host() as host:
        SealedLink.connect(("127.0.0.1", host.port), MINE, HOSTS_NAME).close()
        assert "no rank starts" in told.get(timeout=LONG_S)
        with pytest.raises(HandshakeRefused):
            SealedLink.connect(("127.0.0.1", host.port), OTHER, HOSTS_NAME)
        assert "wrong cluster secret" in told.get(timeout=LONG_S)
    assert written == ["a peer was refused: wrong cluster secret"]


def test_a_host_that_is_told_to_end_waits_for_who_is_there_but_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listening_host() as host:
        assert host._places.acquire(), "as for a rank"
    host.finish(0.2)
    assert "ranks still compute" in caplog.text
