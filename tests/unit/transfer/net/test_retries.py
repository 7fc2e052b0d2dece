"""Slices go again only when nothing of their first try can land any more."""

from __future__ import annotations

import pytest

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import BatchTable, Job, Part, Slice
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.net.retries import RetryQueue
from tests.support.clock import ManualClock

OPS = [TransferOp(1, 0, 1, offset, 8) for offset in (0, 100, 200)]
SLICES = [Slice((op,), 8) for op in OPS]


@pytest.fixture
def queue() -> RetryQueue:
    return RetryQueue("peer", 2)


@pytest.fixture
def job(queue: RetryQueue) -> Job:
    batch = TransferBatch(op=Op.WRITE, peer=SegmentRef("peer", {}, "host"), ops=OPS)
    job = BatchTable(ManualClock()).open(batch)
    job.set_ops(OPS)
    queue.put(job, SLICES)
    return job


def take(queue: RetryQueue) -> Part:
    part = queue.take_unfenced()
    assert part is not None
    return part


def test_slices_go_in_order_and_again_before_all_others(queue: RetryQueue, job: Job) -> None:
    parts = [take(queue), take(queue)]
    queue.again(parts)
    assert [take(queue).slice for _ in SLICES] == SLICES
    assert queue.take_unfenced() is None
    assert not job.ended


def test_nothing_goes_before_the_peer_has_confirmed(queue: RetryQueue, job: Job) -> None:
    part = take(queue)
    queue.hold("connection", [part])
    queue.hold("idle connection", [])
    assert (queue.take_unfenced(), queue.num_held) == (None, 1)
    queue.hold_instead(["connection"], "new connection")
    assert queue.fences == ["new connection"]
    queue.confirm(["connection"])
    assert queue.is_fenced
    queue.confirm(["new connection"])
    assert take(queue) is part


def test_a_stopped_job_ends_unconfirmed_and_its_fence_stays(queue: RetryQueue, job: Job) -> None:
    queue.hold("connection", [take(queue)])
    job.stop("cancelled")
    assert not job.ended
    queue.give_up(job)
    assert job.ended
    assert queue.fences == ["connection"], "the peer must still be told"
    assert queue.num_held == 0
    assert queue.first() is None


def test_too_many_failures_fail_the_job(queue: RetryQueue, job: Job) -> None:
    part = take(queue)
    queue.count_failure([part], "broken")
    assert not job.stopped
    queue.count_failure([part], "broken again")
    queue.again([part])
    assert (job.ended, job.error) == (True, "broken again")


def test_what_cannot_go_fails(queue: RetryQueue, job: Job) -> None:
    queue.hold(7, [take(queue)])
    queue.fail_ready("no path", lambda part: part.slice is SLICES[2])
    assert (job.error, job.ended, len(queue)) == ("no path", False, 1)
    queue.fail_held("the peer has gone")
    assert (job.error, job.ended) == ("no path", True)


def test_a_closed_queue_takes_no_job(queue: RetryQueue, job: Job) -> None:
    queue.close()
    assert queue.first() is None
    batch = TransferBatch(op=Op.READ, peer=job.peer, ops=OPS)
    late = BatchTable(ManualClock()).open(batch)
    queue.put(late, SLICES)
    assert late.error == "the transfer engine is closed"
