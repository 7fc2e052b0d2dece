"""What a batch says to its peer, by every protocol: in order, once, when all has arrived."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator

import pytest

from mooncake.base.clock import ManualClock, MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backends import notice_link
from mooncake.transfer.backends.inproc import InprocFabric
from mooncake.transfer.backends.tcp import parse_endpoint
from mooncake.transfer.batches import MAX_NOTICES
from mooncake.transfer.courier import NOTICES
from mooncake.transfer.engine import MAX_NOTICE_BYTES, Notice, Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.router import RoutedTransfer
from tests.unit.transfer.driving import WAIT_S, WIRED, open_engine, wait_for
from tests.unit.transfer.peer_process import PeerProcess

MIB = 2**20
Open = Callable[..., RoutedTransfer]


@pytest.fixture(params=["inproc", *WIRED])
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def open_named(protocol: str) -> Iterator[Open]:
    fabric, opened = InprocFabric(), []

    def make(engine_id: str, secret: str = "secret") -> RoutedTransfer:
        config = TransferConfig(secret=secret, host="host", protocols=[protocol])
        opened.append(open_transfer(config, engine_id, MonotonicClock(), fabric=fabric))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


def heard_by(transfer: RoutedTransfer, count: int) -> list[Notice]:
    """Return what came, once it is so many."""
    heard: list[Notice] = []
    while len(heard) < count:
        assert select.select([transfer], [], [], WAIT_S)[0], f"{len(heard)} of {count} notices"
        transfer.poll()
        heard += transfer.take_notices()
    return heard


def say(
    to: SegmentRef, payload: bytes | None, *ops: TransferOp, op: Op = Op.WRITE
) -> TransferBatch:
    return TransferBatch(op=op, peer=to, ops=list(ops), notify=payload)


def test_the_peer_hears_once_all_bytes_lie_there(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ours, theirs = us.allocate(24 * MIB, "ours"), peer.allocate(24 * MIB, "theirs")
    for turn in range(8):
        ours.buffer[:] = bytes([turn + 1]) * ours.num_bytes
        whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, ours.num_bytes)
        batch_id = us.submit(say(peer.segment, b"%d" % turn, whole))
        (heard,) = heard_by(peer, 1)
        assert theirs.buffer == ours.buffer, "it was told before the bytes were there"
        assert heard == Notice(engine_id="us", payload=b"%d" % turn)
        assert wait_for(us, [batch_id])[batch_id].error is None
    assert peer.take_notices() == []


def test_one_sender_is_heard_in_order_whatever_takes_long(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ours, theirs = us.allocate(16 * MIB, "ours"), peer.allocate(16 * MIB, "theirs")
    batches = [
        say(
            peer.segment,
            None if number % 7 == 3 else b"%d" % number,
            TransferOp(ours.region_id, 0, theirs.region_id, 0, 16 * MIB if number % 5 == 0 else 64),
            op=Op.READ if number % 3 == 0 else Op.WRITE,
        )
        for number in range(60)
    ]
    ids = [us.submit(batch) for batch in batches]
    assert {done.error for done in wait_for(us, ids).values()} == {None}
    said = [batch.notify for batch in batches if batch.notify is not None]
    assert [notice.payload for notice in heard_by(peer, len(said))] == said


def test_a_batch_without_bytes_only_says_something(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ids = [us.submit(say(peer.segment, payload)) for payload in (b"", b"x" * MAX_NOTICE_BYTES)]
    assert {done.error for done in wait_for(us, ids).values()} == {None}
    assert [len(notice.payload) for notice in heard_by(peer, 2)] == [0, MAX_NOTICE_BYTES]


def test_what_fails_or_is_cancelled_is_never_said_and_holds_nobody_up(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ours, theirs = us.allocate(64 * MIB, "ours"), peer.allocate(64 * MIB, "theirs")
    long = TransferOp(ours.region_id, 0, theirs.region_id, 0, 64 * MIB)
    refused = TransferOp(ours.region_id, 0, 99, 0, 8)
    outside = TransferOp(ours.region_id, 64 * MIB, theirs.region_id, 0, 8)
    late = TransferBatch(
        op=Op.WRITE, peer=peer.segment, ops=[long], notify=b"late", deadline_s=0.001
    )
    batches = [
        say(peer.segment, b"cancelled", long),
        say(peer.segment, b"refused", refused),
        say(peer.segment, b"outside", outside),
        late,
        say(peer.segment, b"well"),
    ]
    ids = [us.submit(batch) for batch in batches]
    us.cancel(ids[0])
    ended = wait_for(us, ids)
    assert [ended[batch_id].error is None for batch_id in ids[1:]] == [False] * 3 + [True]
    faster = [b"cancelled"] if ended[ids[0]].error is None else []
    assert [notice.payload for notice in heard_by(peer, 1)] == [*faster, b"well"]
    assert peer.take_notices() == []


def test_a_full_queue_is_the_senders_error(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ids = [us.submit(say(peer.segment, b"%d" % number)) for number in range(MAX_NOTICES + 3)]
    ended = wait_for(us, ids)
    assert [ended[batch_id].error for batch_id in ids[-3:]] == [
        "peer has no room for more notices"
    ] * 3
    assert {ended[batch_id].error for batch_id in ids[:-3]} == {None}
    heard = [notice.payload for notice in peer.take_notices()]
    assert heard == [b"%d" % number for number in range(MAX_NOTICES)]
    again = us.submit(say(peer.segment, b"again"))
    assert wait_for(us, [again])[again].error is None
    assert [notice.payload for notice in heard_by(peer, 1)] == [b"again"]


def test_what_is_too_long_or_for_nobody_is_refused_at_once(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    mute = SegmentRef("mute", {"tcp": "127.0.0.1:1"}, "host")
    ids = [us.submit(say(peer.segment, b"x" * (MAX_NOTICE_BYTES + 1))), us.submit(say(mute, b"x"))]
    assert [done.error for done in wait_for(us, ids).values()] == [
        f"a notice of {MAX_NOTICE_BYTES + 1} bytes is longer than {MAX_NOTICE_BYTES}",
        "mute cannot be told anything",
    ]


def test_closing_ends_what_waits_to_be_said(open_named: Open) -> None:
    us, peer = open_named("us"), open_named("peer")
    ids = [us.submit(say(peer.segment, b"%d" % number)) for number in range(300)]
    us.close()
    ended = {done.batch_id: done for done in us.poll()}
    assert sorted(ended) == ids
    heard = [int(notice.payload) for notice in peer.take_notices()]
    assert heard == sorted(set(heard))
    for number, batch_id in enumerate(ids):
        error = ended[batch_id].error
        if error is None:
            assert number in heard
        else:
            assert "closed" in error
            assert number not in heard or "unconfirmed" in error


@pytest.fixture(params=WIRED)
def wired(request: pytest.FixtureRequest) -> Iterator[tuple[RoutedTransfer, PeerProcess, str]]:
    name: str = request.param
    process = PeerProcess([name])
    engine = open_engine([name])
    yield engine, process, name
    process.stop()
    engine.close()
    engine.check_integrity()


def test_another_process_hears_when_its_memory_holds_it(
    wired: tuple[RoutedTransfer, PeerProcess, str],
) -> None:
    us, peer, _ = wired
    ours, remote = us.allocate(8 * MIB, "ours"), peer.allocate(8 * MIB)
    for turn in range(5):
        ours.buffer[:] = bytes([turn + 1]) * ours.num_bytes
        whole = TransferOp(ours.region_id, 0, remote, 0, ours.num_bytes)
        us.submit(say(peer.segment, b"%d" % turn, whole))
        first, last = peer.ask(verb="hear", region=remote)
        assert (first, last) == (turn + 1, turn + 1)
        assert peer.ask(verb="heard") == [["us", str(turn)]]
    assert len(wait_for(us, [1, 2, 3, 4, 5])) == 5


def test_a_killed_peer_fails_what_is_to_be_said_to_it(
    wired: tuple[RoutedTransfer, PeerProcess, str],
) -> None:
    us, peer, _ = wired
    peer.stop()
    batch_id = us.submit(say(peer.segment, b"hello"))
    error = wait_for(us, [batch_id])[batch_id].error
    assert error is not None
    assert "peer" in error


def test_a_stalled_peer_is_given_up_and_never_hears(
    wired: tuple[RoutedTransfer, PeerProcess, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    us, peer, _ = wired
    ids = [us.submit(say(peer.segment, b"before"))]
    assert wait_for(us, ids)[ids[0]].error is None
    monkeypatch.setattr(notice_link, "ANSWER_S", 0.2)
    peer.pause()
    ids = [us.submit(say(peer.segment, b"said")), us.submit(say(peer.segment, b"waits"))]
    errors = [done.error or "" for done in wait_for(us, ids).values()]
    assert all("does not answer" in error for error in errors)
    monkeypatch.setattr(notice_link, "ANSWER_S", 30.0)
    peer.resume()
    after = us.submit(say(peer.segment, b"after"))
    assert wait_for(us, [after])[after].error is None
    assert peer.ask(verb="heard") == [["us", "before"], ["us", "after"]]


def test_a_cut_stream_repeats_and_is_heard_once() -> None:
    us, peer = open_engine(["tcp"], "us"), open_engine(["tcp"], "peer")
    proxy = AnswerEater(peer.segment.endpoints[NOTICES])
    try:
        endpoints = {**peer.segment.endpoints, NOTICES: proxy.endpoint}
        to = SegmentRef("peer", endpoints, peer.segment.host)
        ids = [us.submit(say(to, b"%d" % number)) for number in range(3)]
        while len(proxy.eaten) < 1:
            proxy.turn()
        proxy.pass_on = True
        while us._book.num_open:
            proxy.turn()
        assert {done.error for done in wait_for(us, ids).values()} == {None}
        assert [notice.payload for notice in heard_by(peer, 3)] == [b"0", b"1", b"2"]
        assert peer.take_notices() == []
    finally:
        proxy.close()
        us.close()
        peer.close()


class AnswerEater:
    """Stands between two engines; cuts the first connection where the answer to words comes."""

    def __init__(self, endpoint: str) -> None:
        self._owner = parse_endpoint(endpoint)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.eaten: list[bytes] = []
        self.pass_on = False

    def turn(self) -> None:
        """Carry what there is."""
        socks = [self._listener, *(sock for pair in self._pairs for sock in pair)]
        for sock in select.select(socks, [], [], 0.05)[0]:
            if sock is self._listener:
                visitor = sock.accept()[0]
                self._pairs.append((visitor, socket.create_connection(self._owner)))
                continue
            pair = next((pair for pair in self._pairs if sock in pair), None)
            if pair is None:
                continue  # cut in this turn
            visitor, owner = pair
            try:
                data = sock.recv(65536)
            except ConnectionError:
                data = b""
            is_answer = sock is owner and b"answer" in data
            if is_answer and not self.pass_on:
                self.eaten.append(data)
            if not data or (is_answer and not self.pass_on):
                self._cut(pair)
            else:
                (visitor if sock is owner else owner).sendall(data)

    def _cut(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.remove(pair)
        for sock in pair:
            sock.close()

    def close(self) -> None:
        for pair in list(self._pairs):
            self._cut(pair)
        self._listener.close()


@pytest.mark.parametrize("secret", ["wrong", "secret"])
def test_strangers_are_told_nothing_and_not_heard(secret: str) -> None:
    us, peer = open_engine(["tcp"], "us", secret=secret), open_engine(["tcp"], "peer")
    try:
        batch_id = us.submit(say(peer.segment, b"hello"))
        error = wait_for(us, [batch_id])[batch_id].error
        if secret == "wrong":
            assert error == "peer cannot be told: the peer refused: wrong cluster secret"
            assert peer.take_notices() == []
        else:
            assert error is None
            assert [notice.payload for notice in heard_by(peer, 1)] == [b"hello"]
    finally:
        us.close()
        peer.close()


def test_in_time_or_not_at_all() -> None:
    """The deadline holds until the word is out: here it waits for one before it."""
    clock, fabric = ManualClock(50.0), InprocFabric()
    config = TransferConfig(secret="s", host="h", protocols=["inproc"], num_copy_threads=0)
    us, peer = (open_transfer(config, name, clock, fabric=fabric) for name in ("us", "peer"))
    ours, theirs = us.allocate(100, "ours"), peer.allocate(100, "theirs")
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 100)
    us.submit(say(peer.segment, b"first", op))
    us.submit(TransferBatch(op=Op.WRITE, peer=peer.segment, ops=[], notify=b"b", deadline_s=60.0))
    clock.advance_to(59.0)
    assert us.poll()[0].error is None
    assert [notice.payload for notice in peer.take_notices()] == [b"first", b"b"]
    us.submit(say(peer.segment, b"second", op))
    late = us.submit(
        TransferBatch(op=Op.WRITE, peer=peer.segment, ops=[], notify=b"late", deadline_s=70.0)
    )
    clock.advance_to(71.0)
    done = {event.batch_id: event.error for event in us.poll()}
    assert done.pop(late) == "deadline passed after 12.000 s"
    assert list(done.values()) == [None]
    assert [notice.payload for notice in peer.take_notices()] == [b"second"]
    for engine in (us, peer):
        engine.close()
