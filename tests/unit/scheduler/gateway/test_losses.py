"""Workers die, fail, fall silent or lose tokens: requests go on elsewhere, wait, or end with a
reason.
"""

from itertools import pairwise

import msgspec
import pytest

from mooncake.base import (
    Failure,
    FinishReason,
    PeerLost,
    Role,
    Welcome,
    WorkerRef,
)
from mooncake.base.request import FinishInfo
from mooncake.rpc.channel import PeerEnded
from mooncake.telemetry.events import Requeued, WorkerLeft
from tests.support.scheduler.scheduling import (
    Pair,
    SchedulerHarness,
    ref,
    request,
)

BROKEN = FinishInfo(
    reason=FinishReason.ERROR, failure=Failure(status=500, error_type="x", message="no memory")
)
BAD_INPUT = FinishInfo(
    reason=FinishReason.ERROR,
    failure=Failure(status=400, error_type="BadRequestError", message="bad grammar"),
)
FULL = FinishInfo(reason=FinishReason.ERROR, failure=Failure.turned_away("the queue is full"))


@pytest.fixture
def harness() -> Pair:
    return Pair()


# -------------------------------------------------------------------- losses


def test_decode_lost_in_mid_stream_another_goes_on(harness: Pair) -> None:
    d1 = harness.join("d1", Role.DECODE)
    client = harness.submit(request("r", max_tokens=4))
    harness.output(harness.p0, "r", 0, [1])
    harness.output(harness.d0, "r", 1, [2])
    harness.gateway.worker_lost("d0", harness.now)
    harness.gateway.check_integrity()
    (task,) = harness.tasks(d1)
    assert (task.attempt, task.output_tokens) == (2, [1, 2])
    assert harness.tasks(harness.p0)[1].output_tokens == [1, 2]
    harness.output(harness.p0, "r", 2, [3], attempt=2)
    harness.output(d1, "r", 3, [4], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3, 4]
    assert client.final.num_output_tokens == 4
    harness.close()


def test_a_process_that_ended_is_lost_at_once(harness: Pair) -> None:
    d1 = harness.join("d1", Role.DECODE)
    harness.submit(request("r"))
    harness.gateway.handle(PeerEnded("tcp://nobody"), harness.now)
    assert not harness.tasks(d1)
    harness.gateway.handle(PeerEnded(harness.d0.address), harness.now)
    assert [task.attempt for task in harness.tasks(d1)] == [2]
    harness.gateway.check_integrity()


def test_a_loss_is_told_before_the_work_is_given_away(harness: Pair) -> None:
    harness.join("d1", Role.DECODE)
    harness.submit(request("r"))
    harness.channel.sent.clear()
    harness.gateway.worker_lost("d0", harness.now)
    kinds = [type(message).__name__ for to, message in harness.channel.sent if "p0" in to]
    assert kinds == ["PeerLost", "AbortTask", "RequestTask"]


def test_old_attempts_are_not_listened_to(harness: Pair) -> None:
    harness.join("d1", Role.DECODE)
    client = harness.submit(request("r"))
    harness.gateway.worker_lost("d0", harness.now)
    harness.output(harness.p0, "r", 0, [99], attempt=1)
    assert client.tokens == []
    harness.output(harness.p0, "r", 0, [1], attempt=2)
    assert client.tokens == [1]


def test_prefill_lost_before_the_hand_over_is_placed_again(harness: Pair) -> None:
    p1 = harness.join("p1", Role.PREFILL)
    client = harness.submit(request("r", max_tokens=2))
    first = harness.p0 if harness.tasks(harness.p0) else p1
    other = p1 if first == harness.p0 else harness.p0
    harness.output(first, "r", 0, [1])
    harness.gateway.worker_lost(first.worker_id, harness.now)
    assert harness.tasks(other)[0].output_tokens == [1]
    assert [m.attempt for m in harness.aborts(harness.d0)] == [1]
    harness.output(harness.d0, "r", 1, [2], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2]
    harness.close()


def test_prefill_lost_after_the_hand_over_is_no_matter(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=3))
    harness.output(harness.p0, "r", 0, [1])
    harness.output(harness.d0, "r", 1, [2])
    harness.gateway.worker_lost("p0", harness.now)
    harness.gateway.check_integrity()
    harness.output(harness.d0, "r", 2, [3], FinishReason.LENGTH)
    assert client.tokens == [1, 2, 3]
    assert len(harness.tasks(harness.d0)) == 1
    harness.close()


def test_prefill_lost_with_its_first_token_unheard_is_placed_again(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=3))
    harness.output(harness.d0, "r", 1, [2])
    harness.gateway.worker_lost("p0", harness.now)
    assert harness.tasks(harness.d0)[1].prefill is None
    harness.output(harness.d0, "r", 0, [1, 2, 3], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3]
    harness.close()


def test_a_request_that_had_all_its_tokens_just_ends(harness: Pair) -> None:
    full = harness.submit(request("full", max_tokens=2))
    stopped = harness.submit(request("stopped", max_tokens=9, stop_token_ids=frozenset({5})))
    harness.output(harness.d0, "full", 0, [1, 2])
    harness.output(harness.d0, "stopped", 0, [1, 5])
    harness.gateway.worker_lost("d0", harness.now)
    assert full.final.reason is FinishReason.LENGTH
    assert (stopped.final.reason, stopped.final.stop_token_id) == (FinishReason.STOP, 5)
    harness.close()


def test_it_waits_for_a_worker_that_restarts(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=2))
    harness.output(harness.p0, "r", 0, [1])
    harness.gateway.worker_lost("d0", harness.now)
    harness.gateway.check_integrity()
    assert harness.gateway.status(harness.now).load.num_queued == 1
    assert not harness.gateway.status(harness.now).ready
    harness.tick(5.0)
    harness.report(harness.p0)
    again = harness.join("d0", Role.DECODE, epoch="e1")
    assert harness.tasks(again)[0].output_tokens == [1]
    harness.output(again, "r", 1, [2], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2]
    harness.close()


def test_it_does_not_wait_for_ever() -> None:
    harness = Pair(replace_wait_s=30.0)
    client = harness.submit(request("r"))
    harness.gateway.worker_lost("d0", harness.now)
    for _ in range(40):
        harness.report(harness.p0)
        harness.tick(1.0)
    failure = client.final.failure
    assert client.final.reason is FinishReason.ERROR
    assert failure is not None
    assert failure.status == 503
    assert "30 s" in failure.message
    harness.close()


def test_the_waiting_queue_is_bounded() -> None:
    harness = Pair(max_queue=2)
    clients = [harness.submit(request(f"r{i}")) for i in range(4)]
    harness.gateway.worker_lost("d0", harness.now)
    harness.gateway.check_integrity()
    failed = [client.final.failure for client in clients if client.finals]
    assert [failure.status for failure in failed if failure is not None] == [503, 503]


def test_a_waiting_request_can_be_aborted(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.gateway.worker_lost("d0", harness.now)
    harness.gateway.abort("r", harness.now)
    assert client.final.reason is FinishReason.ABORT
    harness.close()


def test_failures_are_tried_elsewhere_then_given_up(harness: Pair) -> None:
    harness.join("d1", Role.DECODE)
    client = harness.submit(request("r"))
    for attempt in (1, 2, 3):
        worker = next(
            w for w in (harness.d0, ref("d1"))
            if any(t.attempt == attempt for t in harness.tasks(w))
        )  # fmt: skip
        if attempt == 2:
            assert worker == ref("d1"), "the worker that failed is avoided"
        harness.output(worker, "r", 0, [], BROKEN, attempt=attempt)
    failure = client.final.failure
    assert failure is not None
    assert failure.status == 503
    assert "no memory" in failure.message
    assert "3 times" in failure.message
    assert len([e for e in harness.events.events if isinstance(e, Requeued)]) == 3
    harness.close()


def test_the_worker_that_failed_is_used_again_for_want_of_another(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=1))
    harness.output(harness.d0, "r", 0, [], BROKEN)
    assert len(harness.aborts(harness.p0)) == 1
    assert harness.aborts(harness.d0) == []
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    harness.close()


def test_workers_that_share_experts_are_lost_as_one(harness: Pair) -> None:
    """Where they end one after another, a request that finds itself on each of them has failed
    once; and once more for each time that they come back and one of them is lost again.
    """
    harness.gateway.worker_lost("d0", harness.now)
    names = [f"shared-{number}" for number in range(5)]

    def join(epoch: int) -> dict[str, WorkerRef]:
        fields = {"epoch": f"e{epoch}", "expert_group": "g"}
        return {name: harness.join(name, Role.DECODE, **fields) for name in names}

    decodes = join(0)
    client = harness.submit(request("r"))
    for epoch in (1, 2, 3):
        for _ in names:
            assert not client.finals
            latest = harness.attempts("r")[-1]
            at = next(
                name for name, decode in decodes.items()
                if any(task.attempt == latest for task in harness.tasks(decode))
            )  # fmt: skip
            del decodes[at]
            harness.gateway.worker_lost(at, harness.now)
            harness.gateway.check_integrity()
            if client.finals:
                break
        if epoch < 3:
            assert not decodes
            decodes = join(epoch)
    assert client.final.failure is not None
    assert "failed 3 times" in client.final.failure.message
    assert len(harness.attempts("r")) == 2 * len(names) + 1
    harness.close()


def test_a_request_turned_away_goes_to_another_worker(harness: Pair) -> None:
    d1 = harness.join("d1", Role.DECODE)
    client = harness.submit(request("r", max_tokens=1))
    full = harness.d0 if harness.tasks(harness.d0) else d1
    other = d1 if full == harness.d0 else harness.d0
    harness.output(full, "r", 0, [], FULL)
    assert harness.aborts(full) == [], "it has nothing to forget"
    assert [task.attempt for task in harness.aborts(harness.p0)] == [1]
    harness.tick(0.5)
    assert [task.attempt for task in harness.tasks(other)] == [2]
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    harness.close()


def test_full_workers_use_up_no_attempts(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=1))
    for attempt in range(1, 40):
        harness.output(harness.p0 if attempt % 2 else harness.d0, "r", 0, [], FULL, attempt=attempt)
        assert client.finals == []
        harness.tick(1.5)
    assert harness.gateway.status(harness.now).counters["requests_turned_away"] == 39
    for attempt in range(40, 43):
        harness.output(harness.p0, "r", 0, [], BROKEN, attempt=attempt)
    assert "3 times" in client.final.failure.message
    harness.close()


def test_a_full_worker_is_not_asked_all_the_time(harness: Pair) -> None:
    harness.submit(request("r"))
    asked_s = [harness.now]
    while harness.now < 20.0:
        harness.output(harness.d0, "r", 0, [], FULL, attempt=len(asked_s))
        while len(harness.attempts("r")) == len(asked_s):
            harness.tick(0.5)
        asked_s.append(harness.now)
    pauses_s = [after - before for before, after in pairwise(asked_s)]
    assert min(pauses_s[1:]) >= 1.0


def test_a_deadline_ends_a_request_that_finds_all_workers_full(harness: Pair) -> None:
    client = harness.submit(request("r", timeout_s=12.0))
    attempt = 0
    while not client.finals:
        if len(harness.attempts("r")) > attempt:
            attempt += 1
            harness.output(harness.d0, "r", 0, [], FULL, attempt=attempt)
        harness.tick(0.5)
    assert client.final.failure.status == 408
    assert harness.now == 12.0
    assert attempt > 3
    harness.close()


def test_the_line_before_full_workers_is_bounded() -> None:
    harness = Pair(max_queue=2)
    clients = [harness.submit(request(f"r{number}")) for number in range(3)]
    for number in range(3):
        harness.output(harness.d0, f"r{number}", 0, [], FULL)
    assert [len(client.finals) for client in clients] == [0, 0, 1]
    assert clients[2].final.failure.status == 503
    assert "the queue is full" in clients[2].final.failure.message


def test_what_no_worker_can_do_is_told_at_once(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [], BAD_INPUT)
    assert client.final.failure == BAD_INPUT.failure
    assert len(harness.aborts(harness.d0)) == 1
    harness.close()


def test_an_unexpected_end_is_a_failure_to_be_tried_again(harness: Pair) -> None:
    harness.submit(request("r"))
    harness.output(harness.d0, "r", 0, [], FinishReason.ABORT)
    assert [task.attempt for task in harness.tasks(harness.d0)] == [1, 2]


def test_a_lost_pool_disturbs_no_request(harness: Pair) -> None:
    kv0 = harness.join("kv0", Role.KVSTORE, node_id="node-p0")
    harness.submit(request("r"))
    harness.gateway.worker_lost("kv0", harness.now)
    harness.gateway.check_integrity()
    assert len(harness.tasks(harness.p0)) == 1
    assert PeerLost(worker=kv0) in harness.channel.of(PeerLost, harness.p0.address)
    assert harness.channel.of(Welcome, harness.p0.address)[-1].kvstore is None


# --------------------------------------------------------------- time passes


def test_a_deadline_ends_a_request_with_408(harness: Pair) -> None:
    client = harness.submit(request("r", timeout_s=5.0))
    for _ in range(5):
        assert not client.finals
        harness.report(harness.p0)
        harness.report(harness.d0)
        harness.tick(1.0)
    assert client.final.failure is not None
    assert client.final.failure.status == 408
    assert len(harness.aborts(harness.d0)) == 1
    harness.close()


def test_the_deadline_of_an_ended_request_does_not_hit_its_namesake(harness: Pair) -> None:
    harness.submit(request("r", timeout_s=5.0))
    harness.gateway.abort("r", harness.now)
    harness.now = 3.0
    client = harness.submit(request("r", timeout_s=5.0))
    harness.tick(2.5)
    assert not client.finals
    harness.tick(2.5)
    assert client.final.failure is not None


def test_tick_says_when_to_come_again(harness: Pair) -> None:
    assert SchedulerHarness().gateway.tick(0.0) is None
    harness.submit(request("r", timeout_s=0.125))
    assert harness.gateway.tick(0.0) == 0.125


def test_silent_workers_are_lost(harness: Pair) -> None:
    client = harness.submit(request("r"))
    for _ in range(12):
        harness.report(harness.p0)
        harness.tick(1.0)
    left = [event for event in harness.events.events if isinstance(event, WorkerLeft)]
    assert [(e.worker_id, e.reason) for e in left] == [("d0", "no heartbeat")]
    assert not client.finals


def test_a_stalled_attempt_is_placed_again() -> None:
    harness = Pair(stall_timeout_s=20.0)
    harness.submit(request("r"))
    for _ in range(23):
        harness.report(harness.p0)
        harness.report(harness.d0)
        harness.tick(1.0)
    assert [task.attempt for task in harness.tasks(harness.d0)] == [1, 2]


def test_a_gap_that_stays_is_placed_again(harness: Pair) -> None:
    harness.tick(8.0)
    client = harness.submit(request("r", max_tokens=3))
    harness.output(harness.d0, "r", 1, [2])
    for _ in range(7):
        harness.report(harness.p0)
        harness.report(harness.d0)
        harness.tick(1.0)
    assert [task.attempt for task in harness.tasks(harness.d0)] == [1, 2]
    harness.output(harness.d0, "r", 0, [1, 2, 3], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3]
    harness.close()


def test_a_worker_that_says_it_leaves_is_lost_at_once(harness: Pair) -> None:
    d1 = harness.join("d1", Role.DECODE)
    harness.submit(request("r"))
    older = msgspec.structs.replace(harness.d0, epoch="an older one")
    harness.gateway.handle(PeerLost(worker=older), harness.now)
    assert harness.tasks(d1) == []
    harness.gateway.handle(PeerLost(worker=harness.d0), harness.now)
    harness.gateway.check_integrity()
    (task,) = harness.tasks(d1)
    assert task.attempt == 2
