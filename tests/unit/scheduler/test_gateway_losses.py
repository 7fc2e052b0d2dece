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
)
from mooncake.base.messages import FinishInfo
from mooncake.telemetry.events import Requeued, WorkerLeft
from tests.support.scheduling import (
    House,
    Pair,
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
def house() -> Pair:
    return Pair()


# -------------------------------------------------------------------- losses


def test_decode_lost_in_mid_stream_another_goes_on(house: Pair) -> None:
    d1 = house.join("d1", Role.DECODE)
    client = house.submit(request("r", max_tokens=4))
    house.output(house.p0, "r", 0, [1])
    house.output(house.d0, "r", 1, [2])
    house.gateway.worker_lost("d0", house.now)
    house.gateway.check_integrity()
    (task,) = house.tasks(d1)
    assert (task.attempt, task.output_tokens) == (2, [1, 2])
    assert house.tasks(house.p0)[1].output_tokens == [1, 2]
    house.output(house.p0, "r", 2, [3], attempt=2)
    house.output(d1, "r", 3, [4], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3, 4]
    assert client.final.num_output_tokens == 4
    house.close()


def test_a_loss_is_told_before_the_work_is_given_away(house: Pair) -> None:
    house.join("d1", Role.DECODE)
    house.submit(request("r"))
    house.channel.sent.clear()
    house.gateway.worker_lost("d0", house.now)
    kinds = [type(message).__name__ for to, message in house.channel.sent if "p0" in to]
    assert kinds == ["PeerLost", "AbortTask", "PrefillTask"]


def test_old_attempts_are_not_listened_to(house: Pair) -> None:
    house.join("d1", Role.DECODE)
    client = house.submit(request("r"))
    house.gateway.worker_lost("d0", house.now)
    house.output(house.p0, "r", 0, [99], attempt=1)
    assert client.tokens == []
    house.output(house.p0, "r", 0, [1], attempt=2)
    assert client.tokens == [1]


def test_prefill_lost_before_the_hand_over_is_placed_again(house: Pair) -> None:
    p1 = house.join("p1", Role.PREFILL)
    client = house.submit(request("r", max_tokens=2))
    first = house.p0 if house.tasks(house.p0) else p1
    other = p1 if first == house.p0 else house.p0
    house.output(first, "r", 0, [1])
    house.gateway.worker_lost(first.worker_id, house.now)
    assert house.tasks(other)[0].output_tokens == [1]
    assert [m.attempt for m in house.aborts(house.d0)] == [1]
    house.output(house.d0, "r", 1, [2], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2]
    house.close()


def test_prefill_lost_after_the_hand_over_is_no_matter(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=3))
    house.output(house.p0, "r", 0, [1])
    house.output(house.d0, "r", 1, [2])
    house.gateway.worker_lost("p0", house.now)
    house.gateway.check_integrity()
    house.output(house.d0, "r", 2, [3], FinishReason.LENGTH)
    assert client.tokens == [1, 2, 3]
    assert len(house.tasks(house.d0)) == 1
    house.close()


def test_prefill_lost_with_its_first_token_unheard_is_placed_again(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=3))
    house.output(house.d0, "r", 1, [2])
    house.gateway.worker_lost("p0", house.now)
    assert house.tasks(house.d0)[1].prefill is None
    house.output(house.d0, "r", 0, [1, 2, 3], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3]
    house.close()


def test_a_request_that_had_all_its_tokens_just_ends(house: Pair) -> None:
    full = house.submit(request("full", max_tokens=2))
    stopped = house.submit(request("stopped", max_tokens=9, stop_token_ids=[5]))
    house.output(house.d0, "full", 0, [1, 2])
    house.output(house.d0, "stopped", 0, [1, 5])
    house.gateway.worker_lost("d0", house.now)
    assert full.final.reason is FinishReason.LENGTH
    assert (stopped.final.reason, stopped.final.stop_token_id) == (FinishReason.STOP, 5)
    house.close()


def test_it_waits_for_a_worker_that_restarts(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=2))
    house.output(house.p0, "r", 0, [1])
    house.gateway.worker_lost("d0", house.now)
    house.gateway.check_integrity()
    assert house.gateway.status(house.now).load.num_queued == 1
    assert not house.gateway.status(house.now).ready
    house.tick(5.0)
    house.report(house.p0)
    again = house.join("d0", Role.DECODE, epoch="e1")
    assert house.tasks(again)[0].output_tokens == [1]
    house.output(again, "r", 1, [2], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2]
    house.close()


def test_it_does_not_wait_for_ever(house: Pair) -> None:
    client = house.submit(request("r"))
    house.gateway.worker_lost("d0", house.now)
    for _ in range(40):
        house.report(house.p0)
        house.tick(1.0)
    failure = client.final.failure
    assert client.final.reason is FinishReason.ERROR
    assert failure is not None
    assert failure.status == 503
    assert "30 s" in failure.message
    house.close()


def test_the_waiting_queue_is_bounded() -> None:
    house = Pair(max_queue=2)
    clients = [house.submit(request(f"r{i}")) for i in range(4)]
    house.gateway.worker_lost("d0", house.now)
    house.gateway.check_integrity()
    failed = [client.final.failure for client in clients if client.finals]
    assert [failure.status for failure in failed if failure is not None] == [503, 503]


def test_a_waiting_request_can_be_aborted(house: Pair) -> None:
    client = house.submit(request("r"))
    house.gateway.worker_lost("d0", house.now)
    house.gateway.abort("r", house.now)
    assert client.final.reason is FinishReason.ABORT
    house.close()


def test_failures_are_tried_elsewhere_then_given_up(house: Pair) -> None:
    house.join("d1", Role.DECODE)
    client = house.submit(request("r"))
    for attempt in (1, 2, 3):
        worker = next(
            w for w in (house.d0, ref("d1"))
            if any(t.attempt == attempt for t in house.tasks(w))
        )  # fmt: skip
        if attempt == 2:
            assert worker == ref("d1"), "the worker that failed is avoided"
        house.output(worker, "r", 0, [], BROKEN, attempt=attempt)
    failure = client.final.failure
    assert failure is not None
    assert failure.status == 503
    assert "no memory" in failure.message
    assert "3 times" in failure.message
    assert len([e for e in house.events.events if isinstance(e, Requeued)]) == 3
    house.close()


def test_the_worker_that_failed_is_used_again_for_want_of_another(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=1))
    house.output(house.d0, "r", 0, [], BROKEN)
    assert len(house.aborts(house.p0)) == 1
    assert house.aborts(house.d0) == []
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    house.close()


def test_who_is_turned_away_goes_to_others(house: Pair) -> None:
    d1 = house.join("d1", Role.DECODE)
    client = house.submit(request("r", max_tokens=1))
    full = house.d0 if house.tasks(house.d0) else d1
    other = d1 if full == house.d0 else house.d0
    house.output(full, "r", 0, [], FULL)
    assert house.aborts(full) == [], "it has nothing to forget"
    assert [task.attempt for task in house.aborts(house.p0)] == [1]
    house.tick(0.5)
    assert [task.attempt for task in house.tasks(other)] == [2]
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    house.close()


def test_full_workers_use_up_no_attempts(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=1))
    for attempt in range(1, 40):
        house.output(house.p0 if attempt % 2 else house.d0, "r", 0, [], FULL, attempt=attempt)
        assert client.finals == []
        house.tick(1.5)
    assert house.gateway.status(house.now).counters["requests_turned_away"] == 39
    for attempt in range(40, 43):
        house.output(house.p0, "r", 0, [], BROKEN, attempt=attempt)
    assert "3 times" in client.final.failure.message
    house.close()


def test_a_full_worker_is_not_asked_all_the_time(house: Pair) -> None:
    house.submit(request("r"))
    asked_s = [house.now]
    while house.now < 20.0:
        house.output(house.d0, "r", 0, [], FULL, attempt=len(asked_s))
        while len(house.attempts("r")) == len(asked_s):
            house.tick(0.5)
        asked_s.append(house.now)
    pauses_s = [after - before for before, after in pairwise(asked_s)]
    assert min(pauses_s[1:]) >= 1.0


def test_a_deadline_ends_who_finds_all_workers_full(house: Pair) -> None:
    client = house.submit(request("r", timeout_s=12.0))
    attempt = 0
    while not client.finals:
        if len(house.attempts("r")) > attempt:
            attempt += 1
            house.output(house.d0, "r", 0, [], FULL, attempt=attempt)
        house.tick(0.5)
    assert client.final.failure.status == 408
    assert house.now == 12.0
    assert attempt > 3
    house.close()


def test_the_line_before_full_workers_is_bounded() -> None:
    house = Pair(max_queue=2)
    clients = [house.submit(request(f"r{number}")) for number in range(3)]
    for number in range(3):
        house.output(house.d0, f"r{number}", 0, [], FULL)
    assert [len(client.finals) for client in clients] == [0, 0, 1]
    assert clients[2].final.failure.status == 503
    assert "the queue is full" in clients[2].final.failure.message


def test_what_no_worker_can_do_is_told_at_once(house: Pair) -> None:
    client = house.submit(request("r"))
    house.output(house.p0, "r", 0, [], BAD_INPUT)
    assert client.final.failure == BAD_INPUT.failure
    assert len(house.aborts(house.d0)) == 1
    house.close()


def test_an_end_nobody_asked_for_is_a_failure_to_be_tried_again(house: Pair) -> None:
    house.submit(request("r"))
    house.output(house.d0, "r", 0, [], FinishReason.ABORT)
    assert [task.attempt for task in house.tasks(house.d0)] == [1, 2]


def test_a_lost_pool_disturbs_no_request(house: Pair) -> None:
    kv0 = house.join("kv0", Role.KVSTORE, node_id="node-p0")
    house.submit(request("r"))
    house.gateway.worker_lost("kv0", house.now)
    house.gateway.check_integrity()
    assert len(house.tasks(house.p0)) == 1
    assert PeerLost(worker=kv0) in house.channel.of(PeerLost, house.p0.address)
    assert house.channel.of(Welcome, house.p0.address)[-1].kvstore is None


# --------------------------------------------------------------- time passes


def test_a_deadline_ends_a_request_with_408(house: Pair) -> None:
    client = house.submit(request("r", timeout_s=5.0))
    for _ in range(5):
        assert not client.finals
        house.report(house.p0)
        house.report(house.d0)
        house.tick(1.0)
    assert client.final.failure is not None
    assert client.final.failure.status == 408
    assert len(house.aborts(house.d0)) == 1
    house.close()


def test_the_deadline_of_an_ended_request_does_not_hit_its_namesake(house: Pair) -> None:
    house.submit(request("r", timeout_s=5.0))
    house.gateway.abort("r", house.now)
    house.now = 3.0
    client = house.submit(request("r", timeout_s=5.0))
    house.tick(2.5)
    assert not client.finals
    house.tick(2.5)
    assert client.final.failure is not None


def test_tick_says_when_to_come_again(house: Pair) -> None:
    assert House().gateway.tick(0.0) is None
    house.submit(request("r", timeout_s=0.125))
    assert house.gateway.tick(0.0) == 0.125


def test_silent_workers_are_lost(house: Pair) -> None:
    client = house.submit(request("r"))
    for _ in range(12):
        house.report(house.p0)
        house.tick(1.0)
    left = [event for event in house.events.events if isinstance(event, WorkerLeft)]
    assert [(e.worker_id, e.reason) for e in left] == [("d0", "no heartbeat")]
    assert not client.finals


def test_a_stalled_attempt_is_placed_again() -> None:
    house = Pair(stall_timeout_s=20.0)
    house.submit(request("r"))
    for _ in range(23):
        house.report(house.p0)
        house.report(house.d0)
        house.tick(1.0)
    assert [task.attempt for task in house.tasks(house.d0)] == [1, 2]


def test_a_gap_that_stays_is_placed_again(house: Pair) -> None:
    house.tick(8.0)
    client = house.submit(request("r", max_tokens=3))
    house.output(house.d0, "r", 1, [2])
    for _ in range(7):
        house.report(house.p0)
        house.report(house.d0)
        house.tick(1.0)
    assert [task.attempt for task in house.tasks(house.d0)] == [1, 2]
    house.output(house.d0, "r", 0, [1, 2, 3], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1, 2, 3]
    house.close()


def test_a_worker_that_says_it_leaves_is_lost_at_once(house: Pair) -> None:
    d1 = house.join("d1", Role.DECODE)
    house.submit(request("r"))
    older = msgspec.structs.replace(house.d0, epoch="an older one")
    house.gateway.handle(PeerLost(worker=older), house.now)
    assert house.tasks(d1) == []
    house.gateway.handle(PeerLost(worker=house.d0), house.now)
    house.gateway.check_integrity()
    (task,) = house.tasks(d1)
    assert task.attempt == 2
