"""Replicas that come and go with the load in a simulated cluster: no request is lost, what is paid
for is counted, and the policy costs less than a cluster as large as its busiest minute needs.
"""

from __future__ import annotations

import functools

import msgspec
import pytest

from mooncake.base import ConfigError, Priority, Role
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.scaling import BUSY, POLICY, RULES
from mooncake.sim.simulation import Simulation
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine
from tests.support.sim.traces import sessions, simulation

LIMITS = {"ttft_slo_s": 10.0, "tbt_slo_s": 0.1}
BOUNDS = "prefill=1..8,decode=1..4,start=30,quiet=60"


def valley_and_hill() -> list[TraceLine]:
    """Return a minute of a prompt each five seconds, one of two a second, and three as before."""
    at_s, lines = 0.0, []
    for until_s, every_s in ((60.0, 5.0), (120.0, 0.5), (300.0, 5.0)):
        while at_s < until_s:
            at_s += every_s
            first = 100 * len(lines)
            lines.append(
                TraceLine(
                    timestamp=1e3 * at_s, input_length=16 * TRACE_BLOCK_TOKENS, output_length=50,
                    hash_ids=list(range(first, first + 16)),
                )
            )  # fmt: skip
    return lines


@functools.cache
def played(rule: str, num_prefill: int = 1) -> tuple[Simulation, SimulationResult]:
    made = simulation(
        valley_and_hill(), num_prefill, 1, scaling=rule, scheduler=LIMITS | {"autoscale": BOUNDS},
        ttft_slo_s=LIMITS["ttft_slo_s"], tbt_slo_s=LIMITS["tbt_slo_s"],
    )  # fmt: skip
    made.run()
    return made, result_of(made)


def test_the_policy_follows_the_load_up_and_down() -> None:
    made, result = played(POLICY)
    prefills = [count for _, count, _ in made.scaler.timeline]
    assert prefills[0] == 1
    assert max(prefills) >= 3
    assert prefills[-1] < max(prefills)
    for _, machine in made.world.machines():
        machine.check_integrity()
    requests = made.measures.requests
    assert all(each.num_finals == 1 for each in requests)
    assert result.requests.failed == 0


def test_it_costs_less_than_the_size_of_the_hill() -> None:
    _, followed = played(POLICY)
    _, fixed = played("fixed", num_prefill=4)
    assert followed.effective_ratio > 0.6, "the hill is twice as long as a start"
    assert followed.node_hours < 0.8 * fixed.node_hours
    assert fixed.node_hours == pytest.approx(fixed.duration_s * fixed.num_nodes / 3600, rel=1e-3)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again = played(POLICY)[1], played.__wrapped__(POLICY)[1]
    assert msgspec.json.encode(first) == msgspec.json.encode(again)


def test_the_plain_rule_follows_how_busy_replicas_are() -> None:
    made, result = played(BUSY)
    assert max(count for _, count, _ in made.scaler.timeline) > 1
    assert result.requests.failed == 0


def test_a_replica_that_leaves_finishes_its_requests_and_its_pool_goes_with_it() -> None:
    made, _ = played(POLICY)
    gone = [
        worker for worker in made.world.workers.values()
        if worker.retired and worker.spec.role is Role.PREFILL
    ]  # fmt: skip
    assert gone, "some left"
    for worker in gone:
        assert worker.process is None
        assert made.world.conductor.view(worker.spec.worker_id) is None
        [pool] = [
            other for other in made.world.workers.values()
            if other.spec.node_id == worker.spec.node_id and other.spec.role is Role.KVSTORE
        ]  # fmt: skip
        assert pool.process is None


def test_batch_work_alone_takes_a_cluster_from_none_and_back() -> None:
    lines = [
        msgspec.structs.replace(line, priority=Priority.BATCH, timestamp=line.timestamp + shift_ms)
        for shift_ms in (0.0, 600_000.0)
        for line in sessions(20)
    ]
    made = simulation(
        lines, 0, 0, scaling=POLICY,
        scheduler={"autoscale": "prefill=0..2,decode=0..2,start=30,quiet=120"},
    )  # fmt: skip
    made.run()
    result = result_of(made)
    assert result.requests.completed == len(lines)
    counts = [counts for _, *counts in made.scaler.timeline]
    assert counts[0] == [0, 0]
    assert counts.count([1, 1]) == 2, "it came, went and came back"
    assert [0, 0] in counts[1:]


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs bounds"):
        simulation(sessions(1), scaling=POLICY)
    with pytest.raises(ConfigError, match=f"is not one of {', '.join(RULES)}"):
        simulation(sessions(1), scaling="cpu")
