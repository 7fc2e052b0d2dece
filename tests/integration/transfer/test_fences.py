"""Grants between real processes: a writer that was stopped in the middle, and goes on after its
grant was revoked, changes no byte any more once the owner's fence says so.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from mooncake.transfer.engine import Op, Region, TransferOp
from mooncake.transfer.grants import FIRST_LOOK_S, Fence
from mooncake.transfer.router import RoutedTransfer
from tests.support.transfer.driving import EMULATED, WAIT_S, WIRED, move, open_engine
from tests.support.transfer.peer_process import PeerProcess

NUM_BYTES = (1 if EMULATED else 12) * 2**20
NUM_STOPS = 4 if EMULATED else 12


@pytest.fixture(params=WIRED)
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def owner(protocol: str) -> Iterator[RoutedTransfer]:
    transfer = open_engine([protocol], "owner")
    yield transfer
    transfer.close()
    transfer.check_integrity()


@pytest.fixture
def writer(protocol: str) -> Iterator[PeerProcess]:
    process = PeerProcess([protocol])
    yield process
    process.stop()


def guarded(owner: RoutedTransfer) -> Region:
    region = owner.allocate(NUM_BYTES, "theirs")
    owner.guard(region)
    return region


def wait_until(found: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.001)


def begin(writer: PeerProcess, owner: RoutedTransfer, region: Region) -> int:
    """Have the writer write without an end, by a new grant; return that."""
    grant = owner.grant()
    writer.ask("keep_writing", owner.segment, region.region_id, NUM_BYTES, grant)
    wait_until(lambda: writer.ask("written")[0] > 1)
    return grant


def test_a_stopped_writer_that_goes_on_writes_nothing_behind_the_fence(
    owner: RoutedTransfer, writer: PeerProcess, protocol: str
) -> None:
    region, num_open = guarded(owner), 0
    for number in range(NUM_STOPS):
        grant = begin(writer, owner, region)
        time.sleep(0.0007 * number)  # so that the stop falls anywhere in a batch
        writer.pause()
        owner.revoke(grant)
        time.sleep(FIRST_LOOK_S)
        fence = owner.fence(grant)
        if protocol == "rdma":  # its queue pairs are destroyed here, while it stands still
            wait_until(lambda grant=grant: owner.fence(grant) is Fence.CLOSED)
        elif fence is Fence.OPEN:  # a copy is in its hands: nothing but its end can close the fence
            num_open += 1
            assert owner.fence(grant) is Fence.OPEN
            writer.resume()
            wait_until(lambda grant=grant: owner.fence(grant) is Fence.CLOSED)
        region.buffer[:] = bytes(NUM_BYTES)
        writer.resume()
        wait_until(lambda: writer.ask("written")[1] is not None)
        assert f"grant {grant} was revoked" in writer.ask("written")[1]
        assert not any(region.buffer)
    assert protocol != "tcp" or num_open == 0, "what comes by sockets never stays open"


def test_the_fence_closes_when_a_stopped_writer_dies(
    owner: RoutedTransfer, writer: PeerProcess
) -> None:
    region = guarded(owner)
    grant = begin(writer, owner, region)
    writer.pause()
    owner.revoke(grant)
    time.sleep(FIRST_LOOK_S)
    writer.signal(signal.SIGKILL)
    wait_until(lambda: owner.fence(grant) is Fence.CLOSED)


def test_guarded_memory_is_written_to_by_grants_only(owner: RoutedTransfer, protocol: str) -> None:
    us = open_engine([protocol])
    region, ours = guarded(owner), us.allocate(100, "ours")
    ours.buffer[:] = b"x" * 100
    ops = [TransferOp(ours.region_id, 0, region.region_id, 0, 100)]
    segment = owner.segment
    assert "by grants only" in (move(us, Op.WRITE, segment, ops).error or "")
    assert not any(region.buffer[:100])
    first, second = owner.grant(), owner.grant()
    owner.revoke(first)
    assert "was revoked" in (move(us, Op.WRITE, segment, ops, grant=first).error or "")
    assert not any(region.buffer[:100])
    assert move(us, Op.WRITE, segment, ops, grant=second).error is None
    assert region.buffer[:100] == ours.buffer
    assert move(us, Op.READ, segment, ops).error is None, "readers need none"
    us.close()
