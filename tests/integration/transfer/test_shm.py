"""Shared memory when the other side does not behave, and what a client can and cannot do."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.errors import ConfigError, ProtocolError
from mooncake.base.ids import SystemIds
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.grants import Fence
from mooncake.transfer.local import MAX_HANDS
from mooncake.transfer.memory import map_shared, map_words
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.shm import wire
from tests.support.transfer.driving import WAIT_S, move, open_engine, wait_for


@pytest.fixture
def owner() -> Iterator[RoutedTransfer]:
    engine = open_engine(["shm"], "owner")
    yield engine
    engine.close()
    engine.check_integrity()


class Client:
    """The client's end of a session, which has shaken hands."""

    def __init__(self, owner: RoutedTransfer) -> None:
        self.sock = connect(owner)
        side = Credentials(
            engine_id="client",
            credential=own_credential("secret", CredentialRole.WORKER),
            ids=SystemIds(),
        ).connect("owner")
        message: bytes | None = side.first_message
        while message is not None:
            self._send(message)
            answer, self.fds = self._receive()
            message = side.step(answer)
        assert side.channel is not None
        self._channel = side.channel

    def ask(self, body: bytes) -> None:
        self._send(self._channel.sent.seal(body))

    def open(self, region_id: int) -> tuple[wire.Answer, list[int]]:
        self.ask(wire.CODEC.encode(wire.OpenRegion(region_id)))
        answer, fds = self._receive()
        return wire.CODEC.decode_answer(self._channel.received.open(answer)), fds

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)

    def _send(self, body: bytes) -> None:
        self.sock.sendall(len(body).to_bytes(4, "little") + body)

    def _receive(self) -> tuple[bytes, list[int]]:
        """Return a frame, which the owner sends at once, and what comes with it."""
        data, fds, _, _ = socket.recv_fds(self.sock, 4096, wire.NUM_PAGES)
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        return data[4:], fds


def connect(owner: RoutedTransfer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + owner.segment.endpoints["shm"].removeprefix("@"))
    sock.settimeout(WAIT_S)
    return sock


def test_a_client_gets_the_memory_it_asks_for_and_no_other(owner: RoutedTransfer) -> None:
    region = owner.allocate(5000, "kv")
    plain = owner.register(memoryview(bytearray(10)), "plain")
    region.buffer[4999] = 77
    client = Client(owner)
    answer, fds = client.open(region.region_id)
    assert isinstance(answer, wire.RegionOpened)
    assert (answer.region_id, answer.num_bytes) == (region.region_id, 5000)
    assert map_shared(fds[0], 5000)[4999] == 77
    for region_id, unshared in [(999, False), (0, False), (plain.region_id, True)]:
        refused, none = client.open(region_id)
        assert isinstance(refused, wire.RegionRefused)
        assert (refused.region_id, refused.unshared, none) == (region_id, unshared, [])
    os.close(fds[0])
    client.close()


def in_directory(directory: Path, engine_id: str) -> RoutedTransfer:
    """Return an engine whose peers find it in a directory."""
    config = TransferConfig(
        secret="secret", host="host", protocols=["shm"], shm_directory=str(directory)
    )
    return open_transfer(config, engine_id, MonotonicClock())


def test_peers_of_networks_of_their_own_find_each_other_in_a_directory(tmp_path: Path) -> None:
    """Who was killed has left a file there; who ends leaves none."""
    left, other = tmp_path / "mooncake-left", tmp_path / "other"
    for file in (left, other):
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(file))
            ended.listen()
    with (
        contextlib.closing(in_directory(tmp_path, "us")) as us,
        contextlib.closing(in_directory(tmp_path, "peer")) as peer,
    ):
        theirs, ours = peer.allocate(100, "kv"), us.allocate(100, "kv")
        theirs.buffer[:] = bytes(range(100))
        ops = [TransferOp(ours.region_id, 0, theirs.region_id, 0, 100)]
        assert move(us, Op.READ, peer.segment, ops).error is None
        assert bytes(ours.buffer) == bytes(range(100))
        places = {each.segment.endpoints["shm"] for each in (us, peer)}
        assert {str(file) for file in tmp_path.iterdir()} == {*places, str(other)}
        own = peer.segment.endpoints["shm"]
        for place in ("@abstract", f"{tmp_path}/../{tmp_path.name}/{Path(own).name}"):
            elsewhere = msgspec.structs.replace(peer.segment, endpoints={"shm": place})
            assert move(us, Op.READ, elsewhere, ops).error, "nobody is looked for elsewhere"
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.parametrize("name", ["missing", "d" * 100])
def test_a_directory_that_cannot_have_sockets_is_refused(tmp_path: Path, name: str) -> None:
    if name != "missing":
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="`shm-directory`: no socket can be made in"):
        in_directory(tmp_path / name, "us")
    assert not [*tmp_path.rglob("*mooncake-*")]


def test_the_state_page_tells_of_withdrawal_and_cannot_be_written(owner: RoutedTransfer) -> None:
    region = owner.allocate(5000, "kv")
    client = Client(owner)
    state_fd = client.fds[0]
    answer, fds = client.open(region.region_id)
    assert isinstance(answer, wire.RegionOpened)
    words = map_words(state_fd, wire.STATE_SLOTS)
    assert words[answer.slot] == region.region_id
    owner.unregister(region)
    assert words[answer.slot] == 0
    again, none = client.open(region.region_id)
    assert isinstance(again, wire.RegionRefused)
    assert none == []
    with pytest.raises(TypeError):
        words[answer.slot] = region.region_id
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(state_fd, b"x", 0)
    os.close(fds[0])
    client.close()


@pytest.mark.parametrize(
    "data",
    [b"garbage", wire.CODEC.encode(wire.OpenRegion(1)), random.Random(3).randbytes(5000), b"\x00"],
    ids=["garbage", "no handshake", "noise", "zero"],
)
def test_without_a_handshake_there_is_no_descriptor(owner: RoutedTransfer, data: bytes) -> None:
    owner.allocate(4096, "kv")
    with connect(owner) as sock:
        sock.sendall(len(data).to_bytes(4, "little") + data)
        got: list[int] = []
        with contextlib.suppress(ConnectionError):
            while True:
                reply, fds, _, _ = socket.recv_fds(sock, 4096, wire.NUM_PAGES)
                got += fds
                if not reply:
                    break
    assert got == []


def test_garbage_after_the_handshake_ends_the_session(owner: RoutedTransfer) -> None:
    client = Client(owner)
    client.ask(b"\xc1 not a question")
    assert client.sock.recv(10) == b""
    client.close()


def test_answers_are_parsed_strictly() -> None:
    opened = wire.RegionOpened(1, 2, 3)
    assert wire.CODEC.decode_answer(wire.CODEC.encode(opened)) == opened
    for data in (b"", b"x", wire.CODEC.encode(wire.OpenRegion(1))):
        with pytest.raises(ProtocolError):
            wire.CODEC.decode_answer(data)
    for data in (b"", b"x", wire.CODEC.encode(opened)):
        with pytest.raises(ProtocolError):
            wire.CODEC.decode_ask(data)


def test_slots_of_the_state_page_are_used_again_but_never_for_one_region_twice() -> None:
    page = wire.StatePage()
    slots = [page.slot_of(region_id) for region_id in range(1, wire.STATE_SLOTS + 1)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(wire.STATE_SLOTS))
    assert page.slot_of(10**6) is None, "all slots are taken"
    assert page.slot_of(5) == slots[4]
    page.withdraw(5)
    page.withdraw(5)
    assert page.slot_of(10**6) == slots[4]
    page.close()


def test_another_host_is_not_reached_by_shared_memory(owner: RoutedTransfer) -> None:
    us = open_engine(["shm"], "us")
    ours, theirs = us.allocate(8, "ours"), owner.allocate(8, "theirs")
    elsewhere = SegmentRef("owner", owner.segment.endpoints, "another host")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)
    done = move(us, Op.READ, elsewhere, [op])
    assert done.error == "owner cannot be reached: no common protocol"
    us.close()


def test_a_listener_that_is_not_an_owner_is_given_up() -> None:
    us = open_engine(["shm"], "us")
    ours = us.allocate(8, "ours")
    with socket.socket(socket.AF_UNIX) as fake:
        name = f"mooncake-test-{os.getpid()}"
        fake.bind(f"\0{name}")
        fake.listen()
        op = TransferOp(ours.region_id, 0, 1, 0, 8)
        place = SegmentRef("fake", {"shm": f"@{name}"}, "host")
        batch_id = us.submit(TransferBatch(op=Op.READ, peer=place, ops=[op]))
        sock, _ = fake.accept()
        sock.recv(4096)
        sock.send(b"\5\0\0\0what?")
        done = wait_for(us, [batch_id])[batch_id]
        assert done.error is not None
        assert "does not speak this protocol" in done.error
        sock.close()
    us.close()


def test_memory_the_owner_has_let_go_is_not_kept_by_its_clients(owner: RoutedTransfer) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:mooncake-passing")

    us = open_engine(["shm"], "us")
    ours = us.allocate(8, "ours")

    def write_new_region() -> None:
        theirs = owner.allocate(8, "passing")
        op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)
        assert move(us, Op.READ, owner.segment, [op]).error is None
        assert num_mapped() >= 2, "the owner's own mapping, and its client's"
        owner.unregister(theirs)

    for _ in range(20):
        write_new_region()
    assert num_mapped() < 8
    us.close()


def test_the_owner_sees_by_which_grants_a_client_copies(owner: RoutedTransfer) -> None:
    grant = owner.grant()
    client = Client(owner)
    state, grants, hands, pipe = client.fds
    words = map_words(hands, MAX_HANDS, writable=True)
    words[7] = grant
    owner.revoke(grant)
    assert owner.fence(grant) is Fence.OPEN
    client.sock.close()
    os.close(hands)
    assert owner.fence(grant) is Fence.OPEN, "it has hung up, and may still copy"
    assert owner.fence(owner.grant()) is Fence.CLOSED, "another grant is not in its hands"
    words[7] = 0
    assert owner.fence(grant) is Fence.CLOSED
    words[7] = grant
    assert owner.fence(grant) is Fence.OPEN
    os.close(pipe)  # as the kernel does when a process dies
    end_s = time.monotonic() + WAIT_S
    while owner.fence(grant) is not Fence.CLOSED:
        assert time.monotonic() < end_s
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(grants, bytes(8), 0)
    for fd in (state, grants):
        os.close(fd)
