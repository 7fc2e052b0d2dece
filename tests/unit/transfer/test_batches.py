"""Jobs end exactly once, and only when no part is in hand."""

from __future__ import annotations

import os
import select
import threading

import pytest

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import BatchTable, Job
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferOp
from tests.support.clock import ManualClock

PEER = SegmentRef("peer", {}, "host")


def batch(num_bytes: int = 8, deadline_s: float | None = None) -> TransferBatch:
    ops = [TransferOp(1, 0, 1, 0, num_bytes)]
    return TransferBatch(op=Op.WRITE, peer=PEER, ops=ops, deadline_s=deadline_s)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def book(clock: ManualClock) -> BatchTable:
    return BatchTable(clock)


def open_job(book: BatchTable, num_parts: int) -> Job:
    request = batch()
    job = book.open(request)
    job.set_ops(request.ops)
    job.expect(num_parts)
    return job


def readable(book: BatchTable) -> bool:
    return bool(select.select([book.done], [], [], 0)[0])


def test_a_job_ends_when_all_parts_are_done(book: BatchTable, clock: ManualClock) -> None:
    job = open_job(book, 2)
    assert job.begin()
    assert job.begin()
    job.finish()
    assert not job.ended
    assert not readable(book)
    clock.advance_to(103.5)
    job.finish()
    assert job.ended
    assert readable(book)
    assert book.done.receive() == [TransferDone(batch_id=job.batch_id, num_bytes=8, seconds=3.5)]
    assert not readable(book)
    assert book.done.receive() == []
    assert book.num_open == 0


def test_the_end_names_each_nic_that_carried_a_part_once(book: BatchTable) -> None:
    job = open_job(book, 3)
    for nics in (("mlx5_1",), ("mlx5_0",), ("mlx5_1",)):
        assert job.begin()
        job.finish(nics=nics)
    assert [done.nics for done in book.done.receive()] == [("mlx5_0", "mlx5_1")]


def test_a_failed_part_fails_the_job_once_the_others_are_back(book: BatchTable) -> None:
    job = open_job(book, 3)
    assert job.begin()
    assert job.begin()
    job.finish("broken")
    assert job.stopped
    assert not job.ended
    assert not job.begin(), "no part begins after a failure"
    job.finish("broken too")
    (done,) = book.done.receive()
    assert (done.error, done.num_bytes) == ("broken", 0)


def test_a_stopped_job_waits_for_what_is_in_hand(book: BatchTable) -> None:
    job = open_job(book, 5)
    assert job.begin()
    job.stop("cancelled")
    job.stop("later reason")
    assert book.done.receive() == []
    job.give_back()
    (done,) = book.done.receive()
    assert done.error == "cancelled"
    job.stop("again")
    assert book.done.receive() == []


def test_a_part_given_back_may_be_done_again(book: BatchTable) -> None:
    job = open_job(book, 1)
    assert job.begin()
    job.give_back()
    assert not job.ended
    assert job.begin()
    job.finish()
    assert book.done.receive()[0].error is None


def test_a_job_stopped_before_it_began_ends_at_once(book: BatchTable) -> None:
    job = book.open(batch())
    job.stop("impossible")
    assert [done.error for done in book.done.receive()] == ["impossible"]
    job.expect(3)
    assert not job.begin()
    assert book.done.receive() == []


def test_no_parts_is_success(book: BatchTable) -> None:
    open_job(book, 0)
    assert [done.error for done in book.done.receive()] == [None]


def test_deadlines_expire_in_order_and_once(book: BatchTable) -> None:
    late, soon, never = (book.open(batch(deadline_s=at)) for at in (30.0, 20.0, None))
    assert book.next_deadline_s() == 20.0
    assert book.take_expired(19.9) == []
    assert book.take_expired(20.0) == [soon]
    assert book.take_expired(20.0) == []
    assert book.next_deadline_s() == 30.0
    late.stop("done with")
    assert book.next_deadline_s() is None
    assert book.take_expired(1e9) == []
    assert book.get(never.batch_id) is never
    assert book.get(late.batch_id) is None
    assert book.open_jobs() == [soon, never]


def test_ids_are_fresh_and_endings_come_in_order(book: BatchTable) -> None:
    jobs = [open_job(book, 1) for _ in range(5)]
    assert len({job.batch_id for job in jobs}) == 5
    for job in reversed(jobs):
        assert job.begin()
        job.finish()
    assert [done.batch_id for done in book.done.receive()] == [
        job.batch_id for job in reversed(jobs)
    ]
    book.check_integrity()


def test_endings_survive_close(book: BatchTable) -> None:
    before = len(os.listdir("/proc/self/fd"))
    job = open_job(book, 1)
    book.done.close()
    book.done.close()
    assert len(os.listdir("/proc/self/fd")) <= before - 1
    job.stop("closed")
    assert [done.error for done in book.done.receive()] == ["closed"]


def test_racing_threads_end_every_job_once(book: BatchTable) -> None:
    """Parts finish, fail and are given back in four threads while a fifth cancels."""
    jobs = [open_job(book, 8) for _ in range(200)]

    def work(connection: int) -> None:
        for index, job in enumerate(jobs):
            for turn in range(4):
                if not job.begin():
                    break
                if (index + connection + turn) % 7 == 0:
                    job.give_back()
                else:
                    job.finish("failed" if (index, turn) == (connection * 13, 2) else None)

    def cancel() -> None:
        for job in jobs:
            job.stop("cancelled")

    threads = [threading.Thread(target=work, args=(connection,)) for connection in range(4)]
    threads.append(threading.Thread(target=cancel))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = book.done.receive()
    assert sorted(event.batch_id for event in done) == [job.batch_id for job in jobs]
    assert book.num_open == 0
