"""The gateway says how many replicas there should be, and a cluster of none takes batch work."""

from __future__ import annotations

import pytest

from mooncake.base import Priority, Role
from mooncake.base.messages import OWN_RELEASE, Booking, GatewayNews
from mooncake.scheduler.gateway.status import ReplicaStatus
from mooncake.scheduler.scaling.policy import CHECK_S
from mooncake.telemetry.events import ReplicasWanted
from tests.support.scheduler.scheduling import Pair, SchedulerHarness, ref, request

TO_NONE = "prefill=0..2,decode=0..2,quiet=60"


def wanted(harness: SchedulerHarness) -> dict[Role, int]:
    return {each.role: each.wanted for each in harness.gateway.scaling.advice}


def wait(harness: SchedulerHarness, seconds: float) -> None:
    """Let time pass, in which workers send their heartbeats."""
    for member in harness.gateway._membership.members:
        harness.gateway._membership.note_alive(member.hello.worker, harness.now + seconds)
    harness.tick(seconds)


def ask(harness: SchedulerHarness, number: int, seconds: float, **fields: object) -> None:
    """Submit so many requests, evenly, and let time pass."""
    for index in range(number):
        harness.submit(request(f"r{harness.now}-{index}", 2000, 100, **fields))
        wait(harness, seconds / number)


def test_advice_is_renewed_every_check_and_shown() -> None:
    harness = Pair(max_inflight=10_000, tbt_slo_s=1.0, ttft_slo_s=20.0)
    harness.tick()
    assert wanted(harness) == {}, "workers may still have to join"
    wait(harness, CHECK_S)
    assert wanted(harness) == {Role.PREFILL: 1, Role.DECODE: 1}
    ask(harness, 200, 60.0)
    assert wanted(harness)[Role.PREFILL] in range(6, 12), "3.3 a second, of two seconds each"
    shown = harness.gateway.status(harness.now).replicas
    assert [each.role for each in shown] == [Role.PREFILL, Role.DECODE]
    assert isinstance(shown[0], ReplicaStatus)
    assert (shown[0].now, shown[0].wanted) == (1, wanted(harness)[Role.PREFILL])
    assert "replicas busy" in shown[0].why
    told = [each for each in harness.events.events if isinstance(each, ReplicasWanted)]
    assert len(told) in (12, 14), "every ten seconds, for both roles"
    assert told[-2].wanted == wanted(harness)[Role.PREFILL]


def test_refused_requests_count_because_more_replicas_would_serve_them() -> None:
    harness = Pair(ttft_slo_s=3.0)
    ask(harness, 200, 60.0)
    counts = harness.gateway.status(harness.now).counters
    assert counts["refused_ttft_limit"] > 100
    assert wanted(harness)[Role.PREFILL] > 6


@pytest.mark.parametrize("kind", ["own limit", "batch"])
def test_what_clients_can_ask_for_at_will_starts_no_replica(kind: str) -> None:
    harness = Pair(ttft_slo_s=20.0, max_inflight=10_000)
    fields = {"ttft_slo_s": 1e-3} if kind == "own limit" else {"priority": Priority.BATCH}
    ask(harness, 200, 60.0, **fields)
    assert wanted(harness) == {Role.PREFILL: 1, Role.DECODE: 1}


def test_workers_that_leave_are_not_counted() -> None:
    harness = Pair()
    harness.join("d1", Role.DECODE)
    harness.report(harness.d0, draining=True)
    harness.tick()
    wait(harness, CHECK_S)
    assert {each.role: each.now for each in harness.gateway.scaling.advice} == {
        Role.PREFILL: 1, Role.DECODE: 1,
    }  # fmt: skip


def test_what_other_gateways_are_asked_for_counts() -> None:
    harness = Pair(ttft_slo_s=20.0)
    other = ref("other")
    for step in range(60):
        sums = [2.0 * step, 4.0 * step, 8.0 * step, 200.0 * step, 2e5 * step]
        harness.gateway.handle(
            GatewayNews(gateway=other, gateways=[], release=OWN_RELEASE, offered=sums), harness.now
        )
        wait(harness, 1.0)
    assert wanted(harness)[Role.PREFILL] > 4


def test_a_cluster_of_no_workers_takes_batch_work_and_starts_for_it() -> None:
    harness = SchedulerHarness(autoscale=TO_NONE)
    harness.tick(CHECK_S + 1.0)
    assert harness.gateway.ready
    assert harness.gateway.missing == []
    assert wanted(harness) == {Role.PREFILL: 0, Role.DECODE: 0}
    client = harness.submit(request("b", priority=Priority.BATCH))
    assert not client.finals
    wait(harness, CHECK_S)
    assert wanted(harness) == {Role.PREFILL: 1, Role.DECODE: 1}
    p0, d0 = harness.join("p0", Role.PREFILL), harness.join("d0", Role.DECODE)
    harness.tick(2.0)
    assert harness.tasks(d0)
    assert harness.tasks(p0)
    harness.gateway.abort("b", harness.now)
    wait(harness, 60.0 + 60.0 + 2 * CHECK_S)
    assert wanted(harness) == {Role.PREFILL: 0, Role.DECODE: 0}
    harness.close()


def test_a_question_to_a_cluster_of_no_workers_is_refused_and_starts_it() -> None:
    harness = SchedulerHarness(autoscale=TO_NONE)
    harness.tick(CHECK_S + 1.0)
    client = harness.submit(request("r"))
    assert client.final.failure is not None
    assert client.final.failure.status == 503
    wait(harness, CHECK_S)
    assert min(wanted(harness).values()) == 1


def test_a_gateway_without_workers_wakes_to_count_what_it_has_refused() -> None:
    """No worker's heartbeat wakes it, and who was refused may not ask again."""
    harness = SchedulerHarness(autoscale=TO_NONE)
    harness.tick(CHECK_S + 1.0)
    assert harness.tick() is None
    harness.submit(request("r"))
    wake_s = harness.tick(1.0)
    assert wake_s is not None
    assert harness.tick(wake_s - harness.now) is None
    assert min(wanted(harness).values()) == 1


def test_the_last_replica_stays_while_another_gateway_has_a_request() -> None:
    harness = Pair(autoscale=TO_NONE)
    booking = Booking(
        request_id="r", computing=harness.p0, decode=harness.d0, keys=b"", sources=(),
        num_tokens=16, num_new_tokens=16, prefill_s=1.0, ttft_s=1.0, num_blocks=1,
    )  # fmt: skip
    for step in range(100):
        news = [booking] if not step else []
        harness.gateway.handle(
            GatewayNews(gateway=ref("other"), gateways=[], release=OWN_RELEASE, news=news),
            harness.now,
        )
        wait(harness, 2.0)
    assert wanted(harness) == {Role.PREFILL: 1, Role.DECODE: 1}


def test_without_bounds_of_none_batch_work_is_refused_while_no_worker_is_there() -> None:
    harness = SchedulerHarness()
    assert not harness.gateway.ready
    client = harness.submit(request("b", priority=Priority.BATCH))
    assert client.final.failure is not None
    assert client.final.failure.status == 503
