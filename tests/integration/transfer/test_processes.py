"""Transfer between two real processes, by every protocol: right bytes and refusals."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, Region, TransferBatch, TransferOp
from mooncake.transfer.router import RoutedTransfer
from tests.support.transfer.driving import EMULATED, WIRED, move, open_engine, wait_for
from tests.support.transfer.peer_process import PeerProcess, digest_of

LARGE = (2 if EMULATED else 16) * 2**20
REGION_BYTES = LARGE + 2**20 + 4099
SIZES = [1, 2, 3, 63, 4095, 4097, 65537, 2**20 - 1, 2**20 + 1, LARGE - 5, LARGE]
NUM_SLICES = 2000 if EMULATED else 5000


@pytest.fixture(scope="module", params=WIRED)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def peer(protocol: str) -> Iterator[PeerProcess]:
    process = PeerProcess([protocol])
    yield process
    process.stop()


@pytest.fixture(scope="module")
def opened(protocol: str) -> Iterator[RoutedTransfer]:
    transfer = open_engine([protocol])
    yield transfer
    transfer.close()
    transfer.check_integrity()


@pytest.fixture
def engine(opened: RoutedTransfer) -> Iterator[RoutedTransfer]:
    """Yield the engine of all these tests: opening one takes long on emulated NICs."""
    yield opened
    assert opened.poll() == []
    opened.check_integrity()


@pytest.fixture(scope="module")
def ours(opened: RoutedTransfer) -> Region:
    """Return memory a little larger than `remote`."""
    return opened.allocate(REGION_BYTES + 4096, "ours")


@pytest.fixture(scope="module")
def remote(peer: PeerProcess) -> int:
    return peer.allocate(REGION_BYTES)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_arrive_at_odd_offsets_and_nowhere_else(
    engine: RoutedTransfer, peer: PeerProcess, ours: Region, num_bytes: int
) -> None:
    span = num_bytes + 2**20
    remote = peer.allocate(span)
    blank = (random.Random(num_bytes).randbytes(2**20) * (span // 2**20 + 1))[:span]
    local_at, remote_at = 13, 4099
    # Fill theirs through the engine, check from within the other process.
    ours.buffer[:span] = blank
    whole = [TransferOp(ours.region_id, 0, remote, 0, span)]
    assert move(engine, Op.WRITE, peer.segment, whole).error is None
    assert peer.digest(remote) == digest_of(blank)
    data = os.urandom(num_bytes)
    ours.buffer[local_at : local_at + num_bytes] = data
    op = TransferOp(ours.region_id, local_at, remote, remote_at, num_bytes)
    done = move(engine, Op.WRITE, peer.segment, [op])
    assert (done.error, done.num_bytes) == (None, num_bytes)
    expected = bytearray(blank)
    expected[remote_at : remote_at + num_bytes] = data
    assert peer.digest(remote) == digest_of(expected)
    # And back, to another odd place.
    ours.buffer[:] = bytes(ours.num_bytes)
    op = TransferOp(ours.region_id, 7, remote, remote_at, num_bytes)
    assert move(engine, Op.READ, peer.segment, [op]).error is None
    expected = bytearray(ours.num_bytes)
    expected[7 : 7 + num_bytes] = data
    assert ours.buffer == expected
    peer.ask("unregister", remote)


def test_thousands_of_slices_scatter_and_gather(
    engine: RoutedTransfer, peer: PeerProcess, remote: int
) -> None:
    source = engine.allocate(LARGE // 2, "source")
    back = engine.allocate(LARGE // 2, "back")
    source.buffer[:] = os.urandom(source.num_bytes)
    rng = random.Random(5)
    step = source.num_bytes // NUM_SLICES
    places = list(range(NUM_SLICES))
    rng.shuffle(places)
    lengths = [rng.randint(1, step) for _ in places]
    writes = [
        TransferOp(source.region_id, index * step, remote, place * step + 1, length)
        for index, (place, length) in enumerate(zip(places, lengths, strict=True))
    ]
    assert move(engine, Op.WRITE, peer.segment, writes).error is None
    reads = [
        TransferOp(back.region_id, op.local_offset, remote, op.remote_offset, op.num_bytes)
        for op in writes
    ]
    rng.shuffle(reads)
    done = move(engine, Op.READ, peer.segment, reads)
    assert (done.error, done.num_bytes) == (None, sum(lengths))
    for index, length in enumerate(lengths):
        start = index * step
        assert back.buffer[start : start + length] == source.buffer[start : start + length]
        assert bytes(back.buffer[start + length : start + step]) == bytes(step - length)


def test_many_batches_at_once_end_once_each(
    engine: RoutedTransfer, peer: PeerProcess, remote: int
) -> None:
    ours = engine.allocate(2**20, "ours")
    ours.buffer[:] = os.urandom(2**20)
    step = 2**20 // 512
    ids = [
        engine.submit(
            TransferBatch(
                op=Op.WRITE,
                peer=peer.segment,
                ops=[TransferOp(ours.region_id, index * step, remote, index * step, step)],
            )
        )
        for index in range(512)
    ]
    assert len(set(ids)) == 512
    ended = wait_for(engine, ids)
    assert {event.error for event in ended.values()} == {None}
    assert peer.get(remote, 0, 2**20) == bytes(ours.buffer)


def test_threads_that_submit_at_the_same_time_do_not_mix_up_their_bytes(
    engine: RoutedTransfer, peer: PeerProcess, remote: int
) -> None:
    """Small batches are sent by whoever submits them, large ones by the loops."""
    ours = engine.allocate(LARGE // 2, "ours")
    ours.buffer[:] = os.urandom(ours.num_bytes)
    ids: list[int] = []

    def submit(connection: int) -> None:
        rng, part = random.Random(connection), ours.num_bytes // 4
        at, end = connection * part, (connection + 1) * part
        while at < end:
            length = min(end - at, rng.choice([1, 100, 5000, 70_000, 300_000]))
            op = TransferOp(ours.region_id, at, remote, at, length)
            batch = TransferBatch(op=Op.WRITE, peer=peer.segment, ops=[op])
            ids.append(engine.submit(batch))
            at += length

    threads = [threading.Thread(target=submit, args=(connection,)) for connection in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = wait_for(engine, ids)
    assert {event.error for event in ended.values()} == {None}
    assert peer.get(remote, 0, ours.num_bytes) == bytes(ours.buffer)


def test_an_empty_batch_succeeds(engine: RoutedTransfer, peer: PeerProcess) -> None:
    done = move(engine, Op.READ, peer.segment, [TransferOp(1, 0, 1, 0, 0)][:0])
    assert (done.error, done.num_bytes) == (None, 0)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(REGION_BYTES, 1), (REGION_BYTES - 1, 2), (0, REGION_BYTES + 1), (2**60, 64), (2**63, 1)],
)
def test_a_range_outside_the_region_is_refused(
    engine: RoutedTransfer, peer: PeerProcess, remote: int, ours: Region, op: Op, offset: int,
    num_bytes: int,
) -> None:  # fmt: skip
    ours.buffer[:8] = b"untouchd"
    before = peer.digest(remote)
    good = TransferOp(ours.region_id, 0, remote, 0, 0)
    bad = TransferOp(ours.region_id, 0, remote, offset, num_bytes)
    done = move(engine, op, peer.segment, [good, bad])
    assert done.num_bytes == 0
    assert done.error is not None
    assert "peer refused: bytes [" in done.error
    assert f"outside region {remote}" in done.error
    if num_bytes <= 64:  # slices of a longer one may have moved before the bad one failed it
        assert peer.digest(remote) == before
        assert ours.buffer[:8] == b"untouchd"


def test_unknown_and_unregistered_regions_are_refused(
    engine: RoutedTransfer, peer: PeerProcess
) -> None:
    ours = engine.allocate(4096, "ours")
    ours.buffer[:] = b"x" * 4096
    done = move(engine, Op.READ, peer.segment, [TransferOp(ours.region_id, 0, 10**9, 0, 8)])
    assert done.error == "peer refused: region 1000000000 is not registered"
    region = peer.allocate(8192)
    op = TransferOp(ours.region_id, 0, region, 0, 4096)
    assert move(engine, Op.WRITE, peer.segment, [op]).error is None
    peer.ask("unregister", region)
    for kind in (Op.WRITE, Op.READ):
        done = move(engine, kind, peer.segment, [op])
        assert done.error == f"peer refused: region {region} is not registered"
    # One bad op spoils its batch, not the connection.
    other = peer.allocate(8192)
    op = TransferOp(ours.region_id, 0, other, 0, 4096)
    assert move(engine, Op.WRITE, peer.segment, [op]).error is None
    assert peer.get(other, 0, 4096) == b"x" * 4096


def test_our_own_bad_ranges_fail_through_the_event(
    engine: RoutedTransfer, peer: PeerProcess, remote: int
) -> None:
    ours = engine.allocate(4096, "ours")
    gone = engine.allocate(4096, "gone")
    engine.unregister(gone)
    for op, words in [
        (TransferOp(ours.region_id, 1, remote, 0, 4096), "lie outside region"),
        (TransferOp(ours.region_id, -1, remote, 0, 1), "lie outside region"),
        (TransferOp(ours.region_id, 0, remote, 0, -1), "lie outside region"),
        (TransferOp(ours.region_id, 0, remote, -1, 1), "remote offset -1 is negative"),
        (TransferOp(gone.region_id, 0, remote, 0, 1), "is not registered"),
        (TransferOp(77, 0, remote, 0, 1), "region 77 is not registered"),
    ]:
        error = move(engine, Op.WRITE, peer.segment, [op]).error
        assert error is not None
        assert words in error


def test_a_peer_that_is_not_there_is_an_error(engine: RoutedTransfer, protocol: str) -> None:
    ours = engine.allocate(4096, "ours")
    nowhere = "@mooncake-nobody" if protocol == "shm" else "127.0.0.1:1"
    op = TransferOp(ours.region_id, 0, 1, 0, 1)
    done = move(engine, Op.READ, SegmentRef("ghost", {protocol: nowhere}, "host"), [op])
    assert done.error is not None
    assert done.error.startswith("ghost")
    done = move(engine, Op.READ, SegmentRef("ghost", {"pigeon": "coop"}, "host"), [op])
    assert done.error == "ghost cannot be reached: no common protocol"
    done = move(engine, Op.READ, SegmentRef("ghost", {protocol: "nonsense"}, "host"), [op])
    assert done.error is not None


def test_another_engine_behind_the_same_address_is_refused(
    engine: RoutedTransfer, peer: PeerProcess, remote: int
) -> None:
    """A worker that was restarted must never be taken for the one before."""
    ours = engine.allocate(4096, "ours")
    before = SegmentRef("peer of yesterday", peer.segment.endpoints, peer.segment.host)
    op = TransferOp(ours.region_id, 0, remote, 0, 16)
    done = move(engine, Op.WRITE, before, [op])
    assert done.error is not None
    assert "engine peer of yesterday is not here, this is peer" in done.error
    assert move(engine, Op.WRITE, peer.segment, [op]).error is None


def test_a_wrong_secret_is_refused_and_logged_on_both_sides(
    protocol: str, peer: PeerProcess, remote: int, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = open_engine([protocol], "stranger", secret="guess")
    ours = stranger.allocate(4096, "ours")
    ours.buffer[:6] = b"secret"
    before = peer.digest(remote)
    with caplog.at_level("DEBUG", logger="mooncake"):
        for kind in (Op.WRITE, Op.READ):
            op = TransferOp(ours.region_id, 0, remote, 0, 6)
            done = move(stranger, kind, peer.segment, [op])
            assert done.error is not None
            assert "the peer refused: wrong cluster secret" in done.error
    stranger.close()
    assert "wrong cluster secret" in caplog.text
    assert any("wrong cluster secret" in line for line in peer.ask("log"))
    assert peer.digest(remote) == before
