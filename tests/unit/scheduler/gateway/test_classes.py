"""Classes have weights, batch is patient, and no tenant is in another's way: step by step, at the
gateway.
"""

from typing import Any

import pytest

from mooncake.base import Drain, FinishReason, Priority, Role
from mooncake.scheduler.requests.permits import RETRY_WAITING_S
from mooncake.telemetry.events import Refused
from tests.support.scheduler.scheduling import Client, Pair, SchedulerHarness, request

BATCH = Priority.BATCH


def reason(client: Client) -> Any:
    failure = client.final.failure
    return failure and failure.status


def test_batch_runs_at_once_where_nothing_else_does() -> None:
    harness = Pair()
    client = harness.submit(request("b", priority=BATCH))
    harness.output(harness.d0, "b", 0, [1, 2, 3, 4], FinishReason.LENGTH)
    assert client.final.reason is FinishReason.LENGTH
    harness.close()


def test_batch_waits_while_prompts_queue_and_is_taken_up_after() -> None:
    harness = Pair(replace_wait_s=1.0)
    harness.submit(request("r", 1000, max_tokens=1))  # a second of work
    batch = [harness.submit(request(f"b{number}", 400, 1, priority=BATCH)) for number in range(3)]
    harness.tick(5.0)
    assert [harness.attempts(f"b{number}") for number in range(3)] == [[], [], []]
    assert not any(client.finals for client in batch), "batch is patient"
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH)
    harness.tick(RETRY_WAITING_S)
    assert [len(harness.attempts(f"b{number}")) for number in range(3)] == [1, 1, 0]
    harness.output(harness.p0, "b0", 0, [1], FinishReason.LENGTH)
    harness.tick(RETRY_WAITING_S)
    for number in (1, 2):
        harness.output(harness.p0, f"b{number}", 0, [1], FinishReason.LENGTH)
    assert [client.final.reason for client in batch] == [FinishReason.LENGTH] * 3
    harness.close()


def test_batch_that_finds_nothing_idle_goes_in_when_others_have_computed_enough() -> None:
    harness = Pair()
    harness.submit(request("r0", 1000, max_tokens=1))
    batch = [harness.submit(request(f"b{number}", 400, 1, priority=BATCH)) for number in range(2)]
    for number in range(8):  # never idle: the next comes before the last has ended
        harness.submit(request(f"r{number + 1}", 1000, max_tokens=1))
        harness.output(harness.p0, f"r{number}", 0, [1], FinishReason.LENGTH)
        harness.tick(RETRY_WAITING_S)
        placed = [len(harness.attempts(f"b{one}")) for one in range(2)]
        assert placed == [number >= 1, number >= 3], "400 tokens for each 1,600 of others"
    tasks = {task.request.request_id: task.turn for task in harness.tasks(harness.p0)}
    assert tasks["b0"] < tasks["r3"], "its turn is now"
    for number in range(2):
        harness.output(harness.p0, f"b{number}", 0, [1], FinishReason.LENGTH)
    assert [client.final.reason for client in batch] == [FinishReason.LENGTH] * 2


def test_batch_does_not_overtake_batch_that_waits() -> None:
    harness = Pair()
    harness.submit(request("r", 1000, max_tokens=1))
    harness.submit(request("b0", priority=BATCH))
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH)
    harness.submit(request("b1", priority=BATCH))
    assert harness.attempts("b1") == []
    harness.tick(RETRY_WAITING_S)
    assert harness.attempts("b0") < harness.attempts("b1")


def test_waiting_batch_can_be_aborted_and_times_out() -> None:
    harness = Pair()
    harness.submit(request("r", 1000, max_tokens=1))
    gone = harness.submit(request("b0", priority=BATCH))
    late = harness.submit(request("b1", priority=BATCH, timeout_s=3.0))
    harness.gateway.abort("b0", harness.now)
    harness.tick(3.0)
    assert gone.final.reason is FinishReason.ABORT
    assert reason(late) == 408


def test_batch_without_workers_is_refused_like_all() -> None:
    harness = SchedulerHarness()
    assert reason(harness.submit(request("b", priority=BATCH))) == 503


def test_batch_yields_where_decode_is_full_and_goes_on_after() -> None:
    harness = SchedulerHarness()
    p0 = harness.join("p0", Role.PREFILL)
    d0 = harness.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    batch = harness.submit(request("b", 60, 20, priority=BATCH))
    harness.output(p0, "b", 0, [1])
    harness.output(d0, "b", 1, [2])
    urgent = harness.submit(request("r", 60, 20))
    assert [(m.request_id, m.attempt) for m in harness.aborts(d0)] == [("b", 1)]
    assert harness.gateway.status(harness.now).counters["batch_yielded"] == 1
    assert len(harness.attempts("r")) == 1
    harness.tick(5.0)
    assert len(harness.attempts("b")) == 1, "still no room"
    harness.output(p0, "r", 0, [1])
    harness.output(d0, "r", 1, [2], FinishReason.STOP)
    assert urgent.final.reason is FinishReason.STOP
    harness.tick(RETRY_WAITING_S)
    assert harness.tasks(d0)[-1].output_tokens == [1, 2], "it goes on where it was"
    harness.output(d0, "b", 2, [3], FinishReason.STOP, attempt=2)
    assert batch.tokens == [1, 2, 3]
    harness.close()


def test_batch_yields_to_no_request_that_its_own_limit_refuses() -> None:
    """However full decode is: asking for the impossible would cost nothing and stop the batch."""
    harness = SchedulerHarness(tbt_slo_s=10.0)
    p0 = harness.join("p0", Role.PREFILL)
    d0 = harness.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    harness.submit(request("b", 60, 20, priority=BATCH))
    harness.output(p0, "b", 0, [1])
    harness.output(d0, "b", 1, [2])
    for limits in ({"tbt_slo_s": 1e-6}, {"ttft_slo_s": 1e-6}):
        assert reason(harness.submit(request("r", 60, 20, **limits))) == 429
    assert harness.aborts(d0) == []
    assert [e.reason for e in harness.events.events if isinstance(e, Refused)] == [
        "request_tbt_limit", "request_ttft_limit",
    ]  # fmt: skip
    harness.submit(request("r", 60, 20, tbt_slo_s=5.0))
    assert len(harness.aborts(d0)) == 1, "to one that can be served it does"


@pytest.mark.parametrize(("limit", "is_moved"), [("cluster", True), ("own", False)])
def test_refusals_by_their_own_limits_move_no_worker(limit: str, is_moved: bool) -> None:
    settings = {"ttft_slo_s": 0.3} if limit == "cluster" else {"ttft_slo_s": 60.0}
    own = {"ttft_slo_s": 0.3} if limit == "own" else {}
    harness = SchedulerHarness(role_switching=True, role_switch_after_s=2.0, **settings)
    for number in range(3):
        harness.join(f"p{number}", Role.PREFILL)
        harness.join(f"d{number}", Role.DECODE)
    for second in range(12):
        for number in range(20):
            client = harness.submit(request(f"r{second}-{number}", 900, **own))
            assert reason(client) == 429
        harness.tick(0.5)
    assert bool(harness.channel.of(Drain)) == is_moved


@pytest.mark.parametrize(("limit", "is_moved"), [("cluster", True), ("own", False)])
def test_full_decode_moves_no_worker_for_a_limit_of_a_request(limit: str, is_moved: bool) -> None:
    shared = {"tbt_slo_s": 10.0} if limit == "cluster" else {}
    own = {"tbt_slo_s": 10.0} if limit == "own" else {}
    harness = SchedulerHarness(role_switching=True, role_switch_after_s=2.0, **shared)
    p0, *_ = [harness.join(f"p{number}", Role.PREFILL) for number in range(3)]
    d0 = harness.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=1)
    harness.submit(request("b", 60, 200))
    harness.output(p0, "b", 0, [1])
    harness.output(d0, "b", 1, [2])
    for second in range(12):
        for number in range(20):
            assert reason(harness.submit(request(f"r{second}-{number}", 60, 20, **own))) == 429
        harness.tick(0.5)
    assert bool(harness.channel.of(Drain)) == is_moved
    wanted = {"cluster": "decode_full", "own": "request_decode_full"}[limit]
    assert {e.reason for e in harness.events.events if isinstance(e, Refused)} == {wanted}


def test_batch_makes_room_for_a_request_with_a_limit_of_its_own() -> None:
    harness = SchedulerHarness()
    p0 = harness.join("p0", Role.PREFILL)
    d0 = harness.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    harness.submit(request("b", 60, 20, priority=BATCH))
    harness.output(p0, "b", 0, [1])
    harness.output(d0, "b", 1, [2])
    harness.submit(request("r", 60, 20, tbt_slo_s=5.0))
    assert len(harness.aborts(d0)) == 1


@pytest.mark.parametrize(("tenant", "is_late"), [("a", True), ("b", False)])
def test_a_flood_under_a_longer_limit_delays_its_own_tenant_only(
    tenant: str, is_late: bool
) -> None:
    harness = SchedulerHarness(ttft_slo_s=1.0)
    harness.join("p0", Role.PREFILL)
    harness.join("d0", Role.DECODE)
    for number in range(30):
        harness.submit(request(f"r{number}", 200, tenant="a", ttft_slo_s=3600.0))
    assert not [e for e in harness.events.events if isinstance(e, Refused)]
    harness.submit(request("late", 200, tenant=tenant))
    refused = [e.request_id for e in harness.events.events if isinstance(e, Refused)]
    assert refused == ["late"] * is_late


def test_yielding_is_no_failure() -> None:
    harness = SchedulerHarness(max_attempts=1)
    p0 = harness.join("p0", Role.PREFILL)
    d0 = harness.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    client = harness.submit(request("b", 60, 20, priority=BATCH))
    for number in range(4):
        harness.submit(request(f"r{number}", 60, 20))
        harness.output(p0, f"r{number}", 0, [1], FinishReason.STOP)
        harness.tick(RETRY_WAITING_S)
    assert len(harness.attempts("b")) == 5
    harness.output(d0, "b", 0, [1], FinishReason.STOP, attempt=5)
    assert client.final.reason is FinishReason.STOP


def test_interactive_does_not_yield_to_premium() -> None:
    harness = SchedulerHarness()
    harness.join("p0", Role.PREFILL)
    d0 = harness.join("d0", Role.DECODE, num_blocks=30)
    harness.submit(request("r", 60, 20))
    harness.submit(request("p", 60, 20, priority=Priority.PREMIUM))
    assert harness.aborts(d0) == []


def test_under_a_limit_premium_goes_in_before_interactive() -> None:
    harness = Pair(ttft_slo_s=2.0)
    clients = [harness.submit(request(f"r{number}", 500)) for number in range(6)]
    assert [bool(client.finals) for client in clients] == [False] * 4 + [True] * 2
    premium = [
        harness.submit(request(f"premium{number}", 500, priority=Priority.PREMIUM))
        for number in range(6)
    ]
    assert [bool(client.finals) for client in premium] == [False] * 3 + [True] * 3, (
        "premium overtakes all but the first, whose turn comes before that of the fourth"
    )
    assert reason(harness.submit(request("r", 500))) == 429
    assert harness.tasks(harness.p0)[-1].request.priority is Priority.PREMIUM


def test_under_a_limit_a_flood_leaves_room_for_others() -> None:
    harness = Pair(ttft_slo_s=2.0)
    flood = [harness.submit(request(f"f{number}", 500, tenant="flood")) for number in range(20)]
    assert sum(not client.finals for client in flood) == 4
    mine = harness.submit(request("mine", 500, tenant="other"))
    assert not mine.finals, "what goes after it does not delay it"
    tasks = {task.request.request_id: task.turn for task in harness.tasks(harness.p0)}
    assert tasks["mine"] == tasks["f0"] < tasks["f1"]


def test_permits_are_kept_for_a_tenant_with_less() -> None:
    harness = Pair(max_inflight=20)
    for number in range(20):
        harness.submit(request(f"f{number}", tenant="flood", max_tokens=1))
    assert reason(harness.submit(request("more", tenant="flood"))) == 429
    assert not harness.submit(request("mine", tenant="other")).finals
    for number in range(2):
        harness.output(harness.p0, f"f{number}", 0, [1], FinishReason.LENGTH)
        assert reason(harness.submit(request("more", tenant="flood"))) == 429
    assert not harness.submit(request("mine too", tenant="other")).finals


@pytest.mark.parametrize("bound", [4, 40])
def test_batch_leaves_permits_to_others(bound: int) -> None:
    harness = Pair(max_inflight=bound)
    harness.submit(request("r", 1000))
    batch = [harness.submit(request(f"b{number}", priority=BATCH)) for number in range(bound)]
    assert 0 < sum(not client.finals for client in batch) < bound
    assert not harness.submit(request("one more")).finals
