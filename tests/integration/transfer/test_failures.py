"""What breaks while bytes move: peers killed, stopped and restarted, batches cancelled or late."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.errors import TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.router import RoutedTransfer
from tests.support.transfer.driving import EMULATED, WAIT_S, WIRED, move, open_engine, wait_for
from tests.support.transfer.peer_process import PeerProcess, digest_of
from tests.support.transfer.rdma_engines import until

MIB = 2**20
LONG = (4 if EMULATED else 32) * MIB
"""Enough that a batch of it is still on its way when something happens to it."""
StartPeer = Callable[..., PeerProcess]


@pytest.fixture(params=WIRED)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    started: list[PeerProcess] = []

    def start(*protocols: str, **settings: str) -> PeerProcess:
        started.append(PeerProcess(list(protocols), **settings))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def open_us() -> Iterator[Callable[..., RoutedTransfer]]:
    opened: list[RoutedTransfer] = []

    def make(*protocols: str, **settings: str) -> RoutedTransfer:
        opened.append(open_engine(list(protocols), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


OpenUs = Callable[..., RoutedTransfer]


def submit_many(
    engine: RoutedTransfer, op: Op, peer: PeerProcess, ops: TransferOp, count: int
) -> list[int]:
    batch = TransferBatch(op=op, peer=peer.segment, ops=[ops])
    return [engine.submit(batch) for _ in range(count)]


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_killed_peer_fails_every_batch_once(
    open_us: OpenUs, start_peer: StartPeer, protocol: str, op: Op
) -> None:
    engine, peer = open_us(protocol), start_peer(protocol)
    remote, ours = peer.allocate(LONG), engine.allocate(LONG, "ours")
    one = TransferOp(ours.region_id, 0, remote, 0, LONG)
    assert move(engine, op, peer.segment, [one]).error is None
    ids = submit_many(engine, op, peer, one, 200)
    assert select.select([engine], [], [], WAIT_S)[0]  # some are through, the others are not
    ended = {event.batch_id: event.error for event in engine.poll()}
    peer.signal(signal.SIGKILL)
    left = [batch_id for batch_id in ids if batch_id not in ended]
    ended |= {batch_id: event.error for batch_id, event in wait_for(engine, left).items()}
    errors = [error for error in ended.values() if error is not None]
    assert errors, "all 200 batches were faster than the signal"
    assert all("peer" in error for error in errors)
    links = engine.links()
    num_whole = 1 + sum(error is None for error in ended.values())
    assert sum(link.num_bytes for link in links) >= num_whole * LONG
    assert sum(link.num_failures for link in links) > 0
    done = move(engine, op, peer.segment, [one])
    assert done.error is not None
    assert engine.poll() == []


def test_a_restarted_peer_is_reached_under_its_new_name_only(
    open_us: OpenUs, start_peer: StartPeer, protocol: str
) -> None:
    engine = open_us(protocol)
    ours = engine.allocate(MIB, "ours")
    ours.buffer[:] = os.urandom(MIB)
    for boot in range(3):
        peer = start_peer(protocol, engine_id=f"boot-{boot}")
        remote = peer.allocate(MIB)
        op = TransferOp(ours.region_id, 0, remote, 0, MIB)
        assert move(engine, Op.WRITE, peer.segment, [op]).error is None
        assert peer.digest(remote) == digest_of(ours.buffer)
        peer.stop()
        assert move(engine, Op.WRITE, peer.segment, [op]).error is not None


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_after_a_cancel_nothing_touches_memory(
    open_us: OpenUs, start_peer: StartPeer, protocol: str, op: Op
) -> None:
    engine, peer = open_us(protocol), start_peer(protocol)
    remote, ours = peer.allocate(2 * LONG), engine.allocate(2 * LONG, "ours")
    one = TransferOp(ours.region_id, 0, remote, 0, 2 * LONG)
    assert move(engine, op, peer.segment, [one]).error is None
    ids = submit_many(engine, op, peer, one, 8)
    for batch_id in ids:
        engine.cancel(batch_id)
    ended = wait_for(engine, ids)
    assert "cancelled" in {event.error for event in ended.values()}
    target_is_ours = op is Op.READ
    if target_is_ours:
        ours.buffer[:] = bytes(2 * LONG)
    else:
        ours.buffer[:] = b"\x01" * (2 * LONG)  # what a late slice would carry
    before = digest_of(ours.buffer) if target_is_ours else peer.digest(remote)
    small = TransferOp(engine.allocate(4096, "other").region_id, 0, peer.allocate(4096), 0, 4096)
    for _ in range(20):
        assert move(engine, op, peer.segment, [small]).error is None
    assert (digest_of(ours.buffer) if target_is_ours else peer.digest(remote)) == before
    engine.cancel(ids[0])
    engine.cancel(10**6)
    assert engine.poll() == []


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_stopped_peer_runs_into_the_deadline_and_applies_nothing_later(
    open_us: OpenUs, start_peer: StartPeer, op: Op
) -> None:
    engine, peer = open_us("tcp"), start_peer("tcp")
    remote, ours = peer.allocate(16 * MIB), engine.allocate(16 * MIB, "ours")
    one = TransferOp(ours.region_id, 0, remote, 0, 16 * MIB)
    assert move(engine, op, peer.segment, [one]).error is None
    peer.pause()
    ours.buffer[:] = b"\xee" * ours.num_bytes
    done = move(engine, op, peer.segment, [one], MonotonicClock().now() + 0.1)
    assert done.error is not None
    assert "deadline passed" in done.error
    assert done.num_bytes == 0
    assert done.seconds >= 0.1
    ours.buffer[:] = b"\xdd" * ours.num_bytes
    peer.resume()
    # The peer is usable again, and nothing of the late batch reaches either memory.
    if op is Op.READ:
        assert digest_of(ours.buffer) == digest_of(b"\xdd" * ours.num_bytes)
        assert move(engine, op, peer.segment, [one]).error is None
        assert digest_of(ours.buffer) == digest_of(bytes(ours.num_bytes))
    else:
        assert move(engine, op, peer.segment, [one]).error is None
        assert peer.digest(remote) == digest_of(b"\xdd" * ours.num_bytes)
    assert engine.poll() == []


def test_a_stopped_owner_does_not_hold_up_shared_memory(
    open_us: OpenUs, start_peer: StartPeer
) -> None:
    engine, peer = open_us("shm"), start_peer("shm")
    known, ours = peer.allocate(MIB), engine.allocate(MIB, "ours")
    unknown = peer.allocate(MIB)
    op = TransferOp(ours.region_id, 0, known, 0, MIB)
    assert move(engine, Op.WRITE, peer.segment, [op]).error is None
    ours.buffer[:] = b"\x05" * MIB
    peer.pause()
    assert move(engine, Op.WRITE, peer.segment, [op]).error is None
    late = TransferOp(ours.region_id, 0, unknown, 0, MIB)
    done = move(engine, Op.WRITE, peer.segment, [late], MonotonicClock().now() + 0.05)
    assert done.error is not None
    assert "deadline passed" in done.error
    peer.resume()
    assert move(engine, Op.WRITE, peer.segment, [late]).error is None
    assert peer.digest(known) == peer.digest(unknown) == digest_of(b"\x05" * MIB)


def test_a_deadline_in_the_past_fails_at_once_and_one_far_away_does_not_matter(
    open_us: OpenUs, start_peer: StartPeer, protocol: str
) -> None:
    engine, peer = open_us(protocol), start_peer(protocol)
    remote, ours = peer.allocate(MIB), engine.allocate(MIB, "ours")
    op = TransferOp(ours.region_id, 0, remote, 0, MIB)
    now = MonotonicClock().now()
    assert move(engine, Op.READ, peer.segment, [op], now + 3600).error is None
    peer.pause()
    if protocol == "tcp":
        done = move(engine, Op.READ, peer.segment, [op], now - 1)
        assert done.error is not None
        assert "deadline passed" in done.error
    peer.resume()


def test_a_deadline_fires_by_itself_whatever_the_pace_of_the_clock(open_us: OpenUs) -> None:
    class SlowClock(MonotonicClock):
        def now(self) -> float:
            return super().now() / 4

    clock = SlowClock()
    engine = open_us("tcp", clock=clock)
    region = engine.allocate(1, "ours")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        segment = SegmentRef("silent", {"tcp": f"127.0.0.1:{silent.getsockname()[1]}"}, "there")
        ops = [TransferOp(region.region_id, 0, 1, 0, 1)]
        done = [
            move(engine, Op.READ, segment, ops, clock.now() + later_s) for later_s in (0.1, 0.01)
        ]
    assert ["deadline passed" in (each.error or "") for each in done] == [True, True]


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_unregistering_in_mid_batch_refuses_the_rest(
    open_us: OpenUs, start_peer: StartPeer, protocol: str, op: Op
) -> None:
    """Whichever side withdraws: the batch fails or was faster, and both sides go on."""
    engine, peer = open_us(protocol), start_peer(protocol)
    for side in ("theirs", "ours"):
        remote, ours = peer.allocate(LONG), engine.allocate(LONG, "ours")
        one = TransferOp(ours.region_id, 0, remote, 0, LONG)
        ids = submit_many(engine, op, peer, one, 20)
        if side == "theirs":
            peer.ask("unregister", remote)
        else:
            engine.unregister(ours)
            ours.buffer[:16] = b"the caller's now"
        ended = wait_for(engine, ids)
        errors = {event.error for event in ended.values()} - {None}
        assert errors
        assert all(
            "unregistered" in error or "not registered" in error for error in errors if error
        )
        if side == "ours":
            assert bytes(ours.buffer[:16]) == b"the caller's now"
    again, ours = peer.allocate(4096), engine.allocate(4096, "ours")
    one = TransferOp(ours.region_id, 0, again, 0, 4096)
    assert move(engine, op, peer.segment, [one]).error is None


def test_memory_that_cannot_be_mapped_goes_by_tcp(open_us: OpenUs, start_peer: StartPeer) -> None:
    engine, peer = open_us("inproc", "shm", "tcp"), start_peer("shm", "tcp")
    ours = engine.allocate(MIB, "ours")
    ours.buffer[:] = os.urandom(MIB)
    shared, plain = peer.allocate(MIB), peer.ask("register", MIB)
    for remote in (shared, plain):
        op = TransferOp(ours.region_id, 0, remote, 0, MIB)
        assert move(engine, Op.WRITE, peer.segment, [op]).error is None
        assert peer.digest(remote) == digest_of(ours.buffer)
    only_shm = open_us("shm", engine_id="only shm")
    mine = only_shm.allocate(64, "mine")
    done = move(only_shm, Op.READ, peer.segment, [TransferOp(mine.region_id, 0, plain, 0, 64)])
    assert done.error is not None
    assert "cannot be mapped by others" in done.error


def test_close_ends_open_batches_and_leaves_nothing_behind(
    start_peer: StartPeer, protocol: str
) -> None:
    peer = start_peer(protocol)
    remote = peer.allocate(LONG)

    def life() -> None:
        engine = open_engine([protocol])
        ours = engine.allocate(LONG, "ours")
        one = TransferOp(ours.region_id, 0, remote, 0, LONG)
        assert move(engine, Op.WRITE, peer.segment, [one]).error is None
        ids = submit_many(engine, Op.WRITE, peer, one, 10)
        engine.close()
        engine.close()
        ended = {event.batch_id: event.error for event in engine.poll()}
        assert sorted(ended) == ids
        assert "the transfer engine is closed" in ended.values()
        late = engine.submit(TransferBatch(op=Op.WRITE, peer=peer.segment, ops=[one]))
        assert [event.batch_id for event in engine.poll()] == [late]
        with pytest.raises(TransferError, match="closed"):
            engine.allocate(4096, "late")
        engine.check_integrity()

    life()
    gc.collect()
    threads, fds, memory = threading.active_count(), num_fds(), mapped_bytes()
    for _ in range(5):
        life()
    gc.collect()
    # What earlier tests left may end meanwhile.
    assert threading.active_count() <= threads
    assert num_fds() <= fds
    assert mapped_bytes() < memory + 16 * MIB


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_bytes() -> int:
    """Shared memory mapped into this process."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        shared = [line.split()[0] for line in lines if "memfd:mooncake" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in (x.split("-") for x in shared))


def test_the_owner_lets_go_of_clients_that_leave(protocol: str) -> None:
    """Clients come and go: no descriptor of theirs stays with the owner."""
    owner, stays = open_engine([protocol], "owner"), open_engine([protocol], "stays")
    theirs = owner.allocate(4096, "theirs")

    def write_from(client: RoutedTransfer, ours: int) -> None:
        op = TransferOp(ours, 0, theirs.region_id, 0, 4096)
        assert move(client, Op.WRITE, owner.segment, [op]).error is None

    mine = stays.allocate(4096, "mine").region_id
    write_from(stays, mine)
    before = num_fds()
    clients = [open_engine([protocol], f"client-{index}") for index in range(5)]
    for client in clients:
        write_from(client, client.allocate(4096, "ours").region_id)
    assert num_fds() > before
    for client in clients:
        client.close()
    deadline_s = time.monotonic() + WAIT_S
    while num_fds() > before:
        assert time.monotonic() < deadline_s, "the owner keeps connections of engines that left"
        write_from(stays, mine)  # a round trip through the owner's loops
    stays.close()
    owner.close()


@pytest.mark.parametrize("protocol", ["tcp", "shm"])
def test_out_of_descriptors_a_batch_fails_and_later_ones_do_not(
    open_us: OpenUs, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    us, owner = open_us(protocol), open_us(protocol, engine_id="owner")
    ours, theirs = us.allocate(8, "ours"), owner.allocate(8, "theirs")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)

    def go() -> str | None:
        batch = TransferBatch(op=Op.READ, peer=owner.segment, ops=[op])
        batch_id = us.submit(batch)
        return wait_for(us, [batch_id])[batch_id].error

    def no_socket(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", no_socket)
        assert "Too many open files" in (go() or "")
    until(lambda: go() is None, lambda: None)
