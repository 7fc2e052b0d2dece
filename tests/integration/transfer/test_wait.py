"""Waiting for a batch in one call: every ending once, in time, with every byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.router import RoutedTransfer
from tests.integration.transfer.test_tcp import FakeOwner, Proxy
from tests.support.transfer.driving import WAIT_S

MIB = 2**20
Open = Callable[[str, str], RoutedTransfer]


@pytest.fixture
def opened() -> Iterator[Open]:
    engines: list[RoutedTransfer] = []
    fabric = InprocFabric()

    def make(protocol: str, engine_id: str) -> RoutedTransfer:
        config = TransferConfig(secret="secret", host="h", protocols=[protocol])
        engines.append(open_transfer(config, engine_id, MonotonicClock(), fabric=fabric))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.check_integrity()


def wait_for_one(engine: RoutedTransfer) -> TransferDone:
    """Return the only ending there is to come."""
    [done] = engine.wait(WAIT_S)
    return done


def num_failures(engine: RoutedTransfer) -> int:
    return sum(link.num_failures for link in engine.links())


@pytest.mark.parametrize("protocol", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_waiting_thread_gets_the_ending_and_every_byte(
    opened: Open, protocol: str, op: Op
) -> None:
    owner, us = opened(protocol, "owner"), opened(protocol, "us")
    size = 20 * MIB
    theirs, ours = owner.allocate(size, "theirs"), us.allocate(size, "ours")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    for num_bytes in (1, 4096, 65_537, MIB, 4 * MIB - 1, size):
        source.buffer[:] = os.urandom(size)
        target.buffer[:] = bytes(size)
        at = size - num_bytes
        ops = [TransferOp(ours.region_id, at, theirs.region_id, at, num_bytes)]
        batch_id = us.submit(TransferBatch(op=op, peer=owner.segment, ops=ops))
        done = wait_for_one(us)
        assert (done.batch_id, done.error, done.num_bytes) == (batch_id, None, num_bytes)
        assert target.buffer[at:] == source.buffer[at:]
        assert not target.array[:at].any()
        assert us.wait(0.0) == []


@pytest.mark.parametrize("protocol", ["shm", "tcp"])
def test_pieces_all_over_a_batch_arrive(opened: Open, protocol: str) -> None:
    owner, us = opened(protocol, "owner"), opened(protocol, "us")
    theirs, ours = owner.allocate(4 * MIB, "theirs"), us.allocate(4 * MIB, "ours")
    ours.buffer[:] = os.urandom(ours.num_bytes)
    step = 9973
    starts = range(0, 4 * MIB - step, step)
    ops = [TransferOp(ours.region_id, at, theirs.region_id, at, step - 1) for at in starts]
    us.submit(TransferBatch(op=Op.WRITE, peer=owner.segment, ops=ops[::-1]))
    assert wait_for_one(us).error is None
    for at in starts:
        assert theirs.buffer[at : at + step - 1] == ours.buffer[at : at + step - 1]
        assert theirs.buffer[at + step - 1] == 0


def test_many_turns_go_over_one_stream_that_does_not_break(opened: Open) -> None:
    """The loop may hear of an answer that the submitting thread has taken: it is not the end."""
    owner, us = opened("tcp", "owner"), opened("tcp", "us")
    theirs, ours = owner.allocate(MIB, "theirs"), us.allocate(MIB, "ours")
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=0, cut_after=0)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    for turn in range(400):
        num_bytes = MIB if turn % 50 == 0 else 1 + turn
        ops = [TransferOp(ours.region_id, 0, theirs.region_id, 0, num_bytes)]
        op = Op.READ if turn % 3 else Op.WRITE
        us.submit(TransferBatch(op=op, peer=through, ops=ops))
        assert wait_for_one(us).error is None
    assert proxy.num_connections == 1
    assert num_failures(us) == 0
    proxy.close()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_stream_that_breaks_under_a_waiting_thread_is_made_anew(opened: Open, op: Op) -> None:
    owner, us = opened("tcp", "owner"), opened("tcp", "us")
    theirs, ours = owner.allocate(2 * MIB, "theirs"), us.allocate(2 * MIB, "ours")
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    source.buffer[:] = os.urandom(source.num_bytes)
    proxy = Proxy(owner.segment.endpoints["tcp"], num_cuts=2, cut_after=5 * MIB)
    through = SegmentRef("owner", {"tcp": proxy.endpoint}, "h")
    ops = [TransferOp(ours.region_id, 0, theirs.region_id, 0, 2 * MIB)]
    while proxy.num_cuts_left > 0:
        target.buffer[:] = bytes(target.num_bytes)
        us.submit(TransferBatch(op=op, peer=through, ops=ops))
        assert wait_for_one(us).error is None
        assert target.buffer == source.buffer
    assert num_failures(us) >= 2
    proxy.close()


def test_waiting_ends_in_time_by_deadline_and_by_a_cancel_of_another_thread(opened: Open) -> None:
    us = opened("tcp", "us")
    ours = us.allocate(4096, "ours")
    silent = FakeOwner(b"")
    batch = TransferBatch(
        op=Op.READ, peer=silent.segment, ops=[TransferOp(ours.region_id, 0, 1, 0, 8)]
    )
    first = us.submit(batch)
    assert us.wait(0.05) == []
    canceller = threading.Thread(target=us.cancel, args=(first,))
    canceller.start()
    done = wait_for_one(us)
    canceller.join()
    assert (done.batch_id, done.error) == (first, "cancelled")
    late = TransferBatch(
        op=Op.READ, peer=silent.segment, ops=batch.ops, deadline_s=MonotonicClock().now() + 0.05
    )
    us.submit(late)
    error = wait_for_one(us).error
    assert error is not None
    assert error.startswith("deadline passed")
    silent.close()


def test_an_owner_that_goes_fails_the_waiting_thread(opened: Open) -> None:
    owner, us = opened("tcp", "owner"), opened("tcp", "us")
    theirs, ours = owner.allocate(4096, "theirs"), us.allocate(4096, "ours")
    ops = [TransferOp(ours.region_id, 0, theirs.region_id, 0, 4096)]
    us.submit(TransferBatch(op=Op.WRITE, peer=owner.segment, ops=ops))
    assert wait_for_one(us).error is None
    segment = owner.segment
    owner.close()
    us.submit(TransferBatch(op=Op.WRITE, peer=segment, ops=ops))
    error = wait_for_one(us).error
    assert error is not None
    assert error.startswith("owner: ")


@pytest.mark.parametrize("protocol", ["shm", "tcp"])
def test_threads_that_wait_on_one_engine_get_every_ending_once(opened: Open, protocol: str) -> None:
    owner, us = opened(protocol, "owner"), opened(protocol, "us")
    sizes = [1, 4096, 300_000, 2 * MIB, 9 * MIB]
    room = sum(sizes)
    theirs, ours = owner.allocate(3 * room, "theirs"), us.allocate(3 * room, "ours")
    ours.buffer[:] = os.urandom(ours.num_bytes)
    begun: set[int] = set()
    ended: list[TransferDone] = []
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            at = thread * room
            for size in sizes:
                ops = [TransferOp(ours.region_id, at, theirs.region_id, at, size)]
                begun.add(us.submit(TransferBatch(op=Op.WRITE, peer=owner.segment, ops=ops)))
                ended.extend(us.wait(0.1))
                at += size
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while len(ended) < 3 * len(sizes):
        found = us.wait(WAIT_S)
        assert found
        ended.extend(found)
    assert not errors
    assert sorted(done.batch_id for done in ended) == sorted(begun)
    assert all(done.error is None for done in ended)
    assert theirs.buffer == ours.buffer
