"""Several NICs, real verbs: both in use, one lost and found again, more peers than endpoints.

The devices are software ones on dummy links, which `ip link set ... down` takes down like a cable.
"""

from __future__ import annotations

import random
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.errors import TransferError
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.rdma import verbs as rdma_verbs
from mooncake.transfer.rdma.backend import RdmaBackend
from mooncake.transfer.rdma.nic import Completion, Outcome, WorkRequest
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.rdma.verbs import NicChoices, VerbsNic, open_nics
from mooncake.transfer.router import RoutedTransfer
from tests.support.transfer.driving import EMULATED, NEEDS_RDMA, WAIT_S, move, wait_for

MIB = 2**20
IN_GUEST = pytest.mark.skipif(
    not EMULATED,
    reason="takes links down: only on the machine 'make test-rdma' boots",
)
pytestmark = NEEDS_RDMA
Open = Callable[..., RoutedTransfer]


@pytest.fixture
def open_rdma() -> Iterator[Open]:
    opened: list[RoutedTransfer] = []

    def make(engine_id: str, **settings: int) -> RoutedTransfer:
        config = TransferConfig(
            secret="secret", host="host", protocols=["rdma"], rdma=RdmaSettings(**settings)
        )
        opened.append(open_transfer(config, engine_id, MonotonicClock()))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
        engine.check_integrity()


def backend_of(engine: RoutedTransfer) -> RdmaBackend:
    (backend,) = engine.backends
    assert isinstance(backend, RdmaBackend)
    return backend


def num_packets(device: str) -> int:
    """Return what the kernel has counted as sent."""
    counters = Path("/sys/class/infiniband") / device / "ports/1/hw_counters"
    return int((counters / "sent_pkts").read_text())


def set_link(number: int, state: str) -> None:
    subprocess.run(["ip", "link", "set", f"eth{number}", state], check=True)


def test_one_batch_goes_by_both_nics(open_rdma: Open) -> None:
    us, owner = open_rdma("us"), open_rdma("owner")
    ours, theirs = us.allocate(32 * MIB, "ours"), owner.allocate(32 * MIB, "theirs")
    ours.buffer[:] = random.Random(1).randbytes(MIB) * 32
    before = {name: num_packets(name) for name in ("rxe0", "rxe1")}
    whole = [TransferOp(ours.region_id, 0, theirs.region_id, 0, 32 * MIB)]
    done = move(us, Op.WRITE, owner.segment, whole)
    assert (done.error, done.protocol, done.nics) == (None, "rdma", ("rxe0", "rxe1"))
    assert theirs.buffer == ours.buffer
    for name, count in before.items():  # a packet carries 1 KiB at most
        assert num_packets(name) - count > 4096, name
    assert {link.nic: link.peer for link in backend_of(us).stats.snapshot()} == {
        "rxe0": "owner",
        "rxe1": "owner",
    }


def test_thousands_of_scattered_slices(open_rdma: Open) -> None:
    us, owner = open_rdma("us"), open_rdma("owner")
    ours, theirs = us.allocate(16 * MIB, "ours"), owner.allocate(16 * MIB, "theirs")
    theirs.buffer[:] = random.Random(2).randbytes(MIB) * 16
    places = random.Random(3).sample(range(4000), 4000)
    ops = [
        TransferOp(ours.region_id, index * 3001, theirs.region_id, place * 3001 + 7, 2999)
        for index, place in enumerate(places)
    ]
    assert move(us, Op.READ, owner.segment, ops).error is None
    for op in ops:
        got = ours.buffer[op.local_offset : op.local_offset + op.num_bytes]
        assert got == theirs.buffer[op.remote_offset : op.remote_offset + op.num_bytes]
    assert ours.buffer[2999:3001] == bytes(2)  # between the pieces nothing was touched


@IN_GUEST
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_nic_that_goes_down_in_mid_batch_and_comes_back(open_rdma: Open, op: Op) -> None:
    us, owner = open_rdma("us"), open_rdma("owner")
    ours, theirs = us.allocate(4 * MIB, "ours"), owner.allocate(4 * MIB, "theirs")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    source.buffer[:] = random.Random(4).randbytes(MIB) * 4
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, 4 * MIB)
    batch = TransferBatch(op=op, peer=owner.segment, ops=[whole])
    ids = [us.submit(batch) for _ in range(12)]
    try:
        set_link(1, "down")
        ended = wait_for(us, ids)
        assert [done.error for done in ended.values()] == [None] * len(ids)
        assert target.buffer == source.buffer
        down = num_packets("rxe1")
        assert move(us, op, owner.segment, [whole]).error is None
        assert num_packets("rxe1") == down
    finally:
        set_link(1, "up")
    for _ in range(400):  # it is looked at ten times a second
        assert move(us, op, owner.segment, [whole]).error is None
        if num_packets("rxe1") > down:
            break
    else:
        pytest.fail("the NIC was never used again")


def test_more_peers_than_endpoints(open_rdma: Open) -> None:
    us = open_rdma("us", max_endpoints=2)
    owners = [open_rdma(f"owner {index}") for index in range(5)]
    ours = us.allocate(MIB, "ours")
    ours.buffer[:] = random.Random(5).randbytes(MIB)
    regions = [owner.allocate(MIB, "theirs") for owner in owners]
    batches = [
        TransferBatch(
            op=Op.WRITE,
            peer=owner.segment,
            ops=[TransferOp(ours.region_id, 0, region.region_id, 0, MIB)],
        )
        for owner, region in zip(owners, regions, strict=True)
    ]
    for _ in range(3):
        ids = [us.submit(batch) for batch in batches for _ in range(4)]
        assert {done.error for done in wait_for(us, ids).values()} == {None}
        assert backend_of(us).num_endpoints <= 2
    assert all(region.buffer == ours.buffer for region in regions)


@pytest.fixture
def nic() -> Iterator[VerbsNic]:
    first, *others = open_nics([], NicChoices())
    for other in others:
        other.close()
    yield first
    first.close()


def completions_of(nic: VerbsNic, count: int) -> list[Completion]:
    found: list[Completion] = []
    for _ in range(10**7):
        found += nic.take_completions()
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} requests ended")


def test_a_nic_that_lost_completions_is_opened_again(
    nic: VerbsNic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests fail than the completion queue holds: it says so, and is of no use any more."""
    assert nic.max_pairs * nic.depth * 2 <= nic._queue.cqe
    memory = np.zeros(4096, dtype=np.uint8)
    at = memory.ctypes.data
    monkeypatch.setattr(rdma_verbs, "_CQ_DEPTH", 16)
    for depth in (16, 2**12):
        nic.reopen()
        region = nic.register(at, 4096)
        asking, serving = nic.new_pair(), nic.new_pair()
        serving.serve(asking.address)
        asking.connect(serving.address)
        key = region.local_key, at + 2048, region.remote_key
        requests = [WorkRequest(index, True, at, *key, 8, True) for index in range(100)]
        asking.post(requests)
        if depth == 16:
            assert select.select([nic.events_fileno()], [], [], WAIT_S)[0]
            with pytest.raises(TransferError, match="reported that it failed"):
                nic.take_events()
            monkeypatch.setattr(rdma_verbs, "_CQ_DEPTH", 2**12)
        else:
            found = completions_of(nic, len(requests))
            assert {each.outcome for each in found} == {Outcome.ARRIVED}
        for part in (asking, serving, region):
            part.close()


@IN_GUEST
def test_a_nic_whose_address_changes_is_reached_by_the_new_one(open_rdma: Open) -> None:
    us, owner = open_rdma("us"), open_rdma("owner")
    ours, theirs = us.allocate(2 * MIB, "ours"), owner.allocate(2 * MIB, "theirs")
    theirs.buffer[:] = random.Random(6).randbytes(MIB) * 2
    whole = [TransferOp(ours.region_id, 0, theirs.region_id, 0, 2 * MIB)]
    assert move(us, Op.READ, owner.segment, whole).error is None
    try:
        readdress("10.0.1.1", "10.0.1.9")
        gids = {backend_of(engine).nics["rxe1"].address.gid[-1] for engine in (us, owner)}
        for _ in range(400):
            ours.buffer[:] = bytes(2 * MIB)
            before = num_packets("rxe1")
            assert move(us, Op.READ, owner.segment, whole).error is None
            assert ours.buffer == theirs.buffer
            gids = {backend_of(engine).nics["rxe1"].address.gid[-1] for engine in (us, owner)}
            if gids == {9} and num_packets("rxe1") - before > 512:
                break
        else:
            pytest.fail(f"the NIC was never used again, with addresses that end in {gids}")
    finally:
        readdress("10.0.1.9", "10.0.1.1")


def readdress(old: str, new: str) -> None:
    for verb, address in (("del", old), ("add", new)):
        subprocess.run(["ip", "address", verb, f"{address}/24", "dev", "eth1"], check=True)


@pytest.mark.parametrize("extended", [True, False])
@pytest.mark.parametrize("mistake", ["none", "past the end", "stale key", "foreign key"])
def test_the_nic_itself_refuses(nic: VerbsNic, mistake: str, extended: bool) -> None:
    """Whatever a peer makes up, the hardware lets it reach what was registered and no more."""
    nic.has_extended_posts = extended
    memory = np.zeros(8192, dtype=np.uint8)
    at = memory.ctypes.data
    memory[:4096] = 7
    source, target = nic.register(at, 4096), nic.register(at + 4096, 2048)
    asking, serving = nic.new_pair(), nic.new_pair()
    serving.serve(asking.address)
    asking.connect(serving.address)
    key, length = target.remote_key, 2048
    if mistake == "past the end":
        length += 1
    elif mistake == "foreign key":
        key ^= 0xABCDEF00
    elif mistake == "stale key":
        target.close()
    request = WorkRequest(5, True, at, source.local_key, at + 4096, key, length, True)
    asking.post([request])
    (ended,) = completions_of(nic, 1)
    assert ended.work_id == 5
    refused = mistake != "none"
    assert ended.outcome is (Outcome.REFUSED if refused else Outcome.ARRIVED)
    assert memory[4096:6144].tolist() == [0 if refused else 7] * 2048
    assert not memory[6144:].any()
    for part in (asking, serving, source):
        part.close()
    if mistake != "stale key":
        target.close()
