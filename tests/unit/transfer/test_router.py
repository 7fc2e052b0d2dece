"""The router with in-process backends: routing, manual-clock deadlines, deterministic polling."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from mooncake.base.errors import ConfigError, TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer import choices
from mooncake.transfer.backend import Backend
from mooncake.transfer.batches import Job
from mooncake.transfer.choices import choose_protocols
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.regions import Gates, RegionTable
from mooncake.transfer.router import RoutedTransfer
from tests.support.clock import ManualClock
from tests.support.transfer.driving import move

Open = Callable[..., RoutedTransfer]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(50.0)


@pytest.fixture
def open_inproc(clock: ManualClock) -> Iterator[Open]:
    """Engines of one process that copy inside `poll` only, unless told to use threads."""
    fabric = InprocFabric()
    opened: list[RoutedTransfer] = []

    def make(engine_id: str, num_copy_threads: int = 0) -> RoutedTransfer:
        config = TransferConfig(
            secret="s", host="h", protocols=["inproc"], num_copy_threads=num_copy_threads
        )
        opened.append(open_transfer(config, engine_id, clock, fabric=fabric))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


def batch(
    peer: RoutedTransfer, ops: list[TransferOp], op: Op = Op.WRITE, deadline_s: float | None = None
) -> TransferBatch:
    return TransferBatch(op=op, peer=peer.segment, ops=ops, deadline_s=deadline_s)


def test_bytes_move_inside_poll_and_nowhere_else(open_inproc: Open, clock: ManualClock) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(100, "ours"), b.allocate(100, "theirs")
    ours.buffer[:5] = b"hello"
    batch_id = a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 50, 5)]))
    assert bytes(theirs.buffer[50:55]) == bytes(5)
    clock.advance_to(51.5)
    (done,) = a.poll()
    assert (done.batch_id, done.error, done.num_bytes, done.seconds) == (batch_id, None, 5, 1.5)
    assert bytes(theirs.buffer[50:55]) == b"hello"
    assert a.poll() == []
    assert b.poll() == []


def test_what_moved_is_counted_by_link_and_in_all(open_inproc: Open) -> None:
    a, b, c = (open_inproc(name) for name in "abc")
    ours = a.allocate(100, "ours")
    for peer, num_bytes in ((b, 60), (b, 7), (c, 1)):
        theirs = peer.allocate(100, "theirs")
        whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, num_bytes)
        a.submit(batch(peer, [whole]))
    assert [done.error for done in a.poll()] == [None] * 3
    links = {(link.nic, link.peer): (link.num_bytes, link.num_slices) for link in a.links()}
    assert links == {("memory", "b"): (67, 2), ("memory", "c"): (1, 1)}
    assert a.counters()["transfer_inproc_bytes"] == 68
    assert b.counters()["transfer_inproc_bytes"] == 0


def test_an_engine_reaches_itself(open_inproc: Open) -> None:
    a = open_inproc("a")
    region = a.allocate(10, "self")
    region.buffer[:4] = b"abcd"
    a.submit(batch(a, [TransferOp(region.region_id, 0, region.region_id, 6, 4)]))
    assert [done.error for done in a.poll()] == [None]
    assert bytes(region.buffer) == b"abcd\0\0abcd"


def test_with_threads_the_descriptor_tells(open_inproc: Open) -> None:
    a, b = open_inproc("a", 2), open_inproc("b", 2)
    ours, theirs = a.allocate(40 * 2**20, "ours"), b.allocate(40 * 2**20, "theirs")
    theirs.buffer[:] = os.urandom(2**20) * 40
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, 40 * 2**20)
    assert move(a, Op.READ, b.segment, [whole]).error is None
    assert ours.buffer == theirs.buffer


def test_refusals_name_the_owner(open_inproc: Open) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(100, "ours"), b.allocate(10, "theirs")
    a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 5, 6)]))
    a.submit(batch(b, [TransferOp(ours.region_id, 0, 99, 0, 6)]))
    b.unregister(theirs)
    a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 0, 1)]))
    b.close()
    a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 0, 1)]))
    assert [done.error for done in a.poll()] == [
        "b refused: bytes [5, 11) lie outside region 1 (theirs) of 10 bytes",
        "b refused: region 99 is not registered",
        "b refused: region 1 is not registered",
        "b cannot be reached: no common protocol",
    ]


def test_a_batch_queued_before_the_region_went_touches_nothing(open_inproc: Open) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(8, "ours"), b.allocate(8, "theirs")
    ours.buffer[:] = b"too late"
    a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)]))
    b.unregister(theirs)
    assert [done.error for done in a.poll()] == ["region 1 (theirs) was unregistered"]
    assert bytes(theirs.buffer) == bytes(8)


def test_deadlines_follow_the_drivers_clock(open_inproc: Open, clock: ManualClock) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(8, "ours"), b.allocate(8, "theirs")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)
    a.submit(batch(b, [op], deadline_s=60.0))
    assert [done.error for done in a.poll()] == [None]
    late = a.submit(batch(b, [op], deadline_s=60.0))
    assert a.expire() == 60.0
    clock.advance_to(60.0)
    assert a.expire() is None
    ours.buffer[:] = b"too late"
    (done,) = a.poll()
    assert (done.batch_id, done.error) == (late, "deadline passed after 10.000 s")
    assert bytes(theirs.buffer) == bytes(8)


def test_a_cancelled_batch_ends_once_and_moves_nothing(open_inproc: Open) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(8, "ours"), b.allocate(8, "theirs")
    ours.buffer[:] = b"too late"
    first = a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)]))
    second = a.submit(batch(b, [TransferOp(ours.region_id, 4, theirs.region_id, 0, 4)]))
    a.cancel(first)
    a.cancel(first)
    assert [(done.batch_id, done.error) for done in a.poll()] == [
        (first, "cancelled"),
        (second, None),
    ]
    assert bytes(theirs.buffer) == b"late" + bytes(4)


def test_too_many_open_batches_fail_through_their_event(
    open_inproc: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.transfer.router.MAX_OPEN_BATCHES", 3)
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(8, "ours"), b.allocate(8, "theirs")
    for _ in range(5):
        a.submit(batch(b, [TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)]))
    errors = [done.error for done in a.poll()]
    assert errors == ["more than 3 batches are under way"] * 2 + [None] * 3


def test_the_secret_is_not_printed() -> None:
    assert "hush" not in repr(TransferConfig(secret="hush", host="h"))


def test_close_ends_what_is_open_and_refuses_the_rest(open_inproc: Open) -> None:
    a, b = open_inproc("a"), open_inproc("b")
    ours, theirs = a.allocate(8, "ours"), b.allocate(8, "theirs")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 8)
    a.submit(batch(b, [op]))
    a.close()
    assert [done.error for done in a.poll()] == ["the transfer engine is closed"]
    a.submit(batch(b, [op]))
    assert len(a.poll()) == 1
    with pytest.raises(TransferError):
        a.register(memoryview(bytearray(4)), "late")


def test_two_engines_of_one_name_cannot_be(open_inproc: Open) -> None:
    open_inproc("a")
    with pytest.raises(ValueError, match="has the id 'a'"):
        open_inproc("a")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TransferConfig(secret="s", host="h", protocols=["tcp", "pigeon"]), "pigeon is not known"),
        (TransferConfig(secret="s", host="h", protocols=[]), "the empty list is not known"),
        (TransferConfig(secret="", host="h"), "secret is empty"),
        (TransferConfig(secret="s", host="h", num_io_threads=0), "at least one I/O thread"),
        (
            TransferConfig(
                secret="s", host="h", protocols=["tcp", "rdma"], protection=Protection.ENCRYPT
            ),
            "because NICs write memory as it is; leave rdma out of `transport`",
        ),
    ],
)
def test_bad_settings_are_named(config: TransferConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_transfer(config, "x", ManualClock())


def test_encryption_leaves_rdma_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "usable_protocols", lambda: choices.PROTOCOLS)
    assert choose_protocols(["auto"]) == ("shm", "rdma", "tcp")
    assert choose_protocols(["auto"], "encrypt") == ("shm", "tcp")
    assert choose_protocols(["tcp", "rdma"], "mac") == ("rdma", "tcp")
    with pytest.raises(ConfigError, match="RDMA cannot encrypt"):
        choose_protocols(["tcp", "rdma"], "encrypt")
    with pytest.raises(ConfigError, match="'rot13' is not one of auto, none, mac, encrypt"):
        choose_protocols(["auto"], "rot13")


def test_a_failed_start_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        open_transfer(TransferConfig(secret="s", host="h", protocols=["rdma"]), "x", ManualClock())
    assert set(threading.enumerate()) <= before


class Fussy(Backend):
    """Declines everything, or takes it and does nothing."""

    def __init__(self, protocol: str, router: RoutedTransfer, reason: str | None) -> None:
        self._protocol = protocol
        self._router = router
        self._reason = reason
        self.started: list[Job] = []
        self.stopped: list[Job] = []
        self._stats = LinkStats(protocol)

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        return (self._stats,)

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def endpoint(self) -> str:
        return f"at {self._protocol}"

    def reaches(self, peer: SegmentRef) -> bool:
        return self._protocol in peer.endpoints

    def start(self, job: Job) -> None:
        self.started.append(job)
        if self._reason is not None:
            self._router.decline(job, self._reason)
        else:
            job.expect(1)
            assert job.begin()

    def stop_sent(self, job: Job) -> None:
        if job in self.started:
            self.stopped.append(job)
            job.give_back()

    def close(self) -> None:
        pass


def test_what_one_way_declines_goes_the_next(clock: ManualClock) -> None:
    router = RoutedTransfer("me", "h", RegionTable(Gates()), clock)
    fast = Fussy("fast", router, "no road")
    other = Fussy("other", router, None)
    slow = Fussy("slow", router, None)
    for backend in (fast, other, slow):
        router.add_backend(backend)
    assert router.segment.endpoints == {"fast": "at fast", "other": "at other", "slow": "at slow"}
    ours = router.allocate(8, "ours")
    op = TransferOp(ours.region_id, 0, 1, 0, 8)
    peer = SegmentRef("you", {"fast": "", "slow": ""}, "h")
    batch_id = router.submit(TransferBatch(op=Op.READ, peer=peer, ops=[op]))
    assert [len(backend.started) for backend in (fast, other, slow)] == [1, 0, 1]
    assert router.poll() == []
    router.cancel(batch_id)
    assert [done.error for done in router.poll()] == ["cancelled"]
    only_fast = SegmentRef("you", {"fast": ""}, "h")
    router.submit(TransferBatch(op=Op.READ, peer=only_fast, ops=[op]))
    assert [done.error for done in router.poll()] == ["you cannot be reached: no road"]
    assert not select.select([router], [], [], 0)[0]
    router.close()
