"""The result of one simulated run as plain values, which `--json` writes. Field names are stable.

Pure: made from the measures after a run.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.base.messages import Role
from mooncake.decode.worker import DecodeWorker
from mooncake.prefill.worker import PrefillWorker
from mooncake.sim.measure import Moment, Spread
from mooncake.sim.simulation import START_S, Simulation
from mooncake.sim.timeline import RANKS
from mooncake.sim.world.runner import SimRunner

NUM_BINS = 60


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    rejected: int
    rejected_before_prefill: int
    rejected_after_prefill: int
    """Requests refused after their prompt had been computed, so that the work was lost."""
    failed: int
    reasons: dict[str, int]
    """Rejections by reason."""


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    hit_tokens: int
    total_tokens: int
    hit_rate: float
    by_tier: dict[str, int]
    """Tokens reused from the computing instance's own HBM, from the pool of its node, and from
    other pools.
    """


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts in bins whose borders grow by a constant factor."""

    edges: list[float]
    counts: list[int]


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. Times are as clients see them, of the messages that they received."""

    model: str
    hardware: str
    engine: str
    policy: str
    num_prefill: int
    num_decode: int
    num_nodes: int
    """Nodes at the start."""
    node_hours: float = 0.0
    """What all nodes together cost from the first request to the end of the last."""
    fitted: str = ""
    """Which figures of the hardware were fitted, as text for people."""
    instance: str
    """The shape of an instance and the tokens of KV that it holds, as text for people."""
    seed: int
    duration_s: float
    """The time from the first arrival to the last end."""
    ttft_slo_s: float
    tbt_slo_ms: float
    requests: RequestCounts
    ttft_s: Spread
    tbt_ms: Spread
    """The distribution of all gaps of all requests."""
    tbt_slow10_ms: Spread
    """The distribution over requests of the mean of each one's slowest tenth of gaps."""
    effective_requests: int
    effective_ratio: float
    """The share among all requests, including refused ones."""
    ttft_inside_ratio: float
    """The share among all requests of those whose first token came in time."""
    effective_by_tbt_ms: dict[str, float]
    """The same ratio at other TBT limits."""
    goodput_rps: float
    cache: CacheFigures
    prefill_busy_s: float
    decode_busy_s: float
    prefill_utilisation: float
    decode_utilisation: float
    prefill_s_per_request: float
    wasted_prefill_tokens: int
    """Tokens computed for requests that were refused afterwards."""
    transfer_bytes: int
    load_swing: float
    """The mean change, from moment to moment, of the difference between the two pools' loads."""
    replicas: dict[str, float]
    """The copies in the pools of the block with that rank of use, averaged over the run's second
    half.
    """
    holders: dict[str, float] = {}
    """The same for the nodes that have it in a pool or in a prefill instance's HBM."""
    ttft_histogram_s: Histogram
    tbt_histogram_ms: Histogram
    timeline: list[Moment]
    num_events: int
    """The number of events that the simulator ran."""


def result_of(simulation: Simulation) -> SimulationResult:
    config, measures = simulation.config, simulation.measures
    requests = measures.requests
    ttfts = [r.ttft_s for r in requests if r.ttft_s is not None]
    gaps = np.concatenate([np.frombuffer(r.gaps_s) for r in requests if r.gaps_s] or [np.zeros(0)])
    slow = [r.slow_gap_s for r in requests if r.gaps_s]
    effective = _num_effective(simulation, config.tbt_slo_s)
    duration_s = max(simulation.world.heap.now() - START_S, 1e-9)
    num_instances = simulation.cost.shape.dp  # of each engine
    busy = {role: _busy_s(simulation, role) for role in (Role.PREFILL, Role.DECODE)}
    ended_s = simulation.world.heap.now()
    paid_s = {
        role: num_instances * simulation.scaler.seconds(role, ended_s)
        for role in (Role.PREFILL, Role.DECODE)
    }
    wasted = [r for r in requests if r.shed or (not r.completed and r.first_s is not None)]
    return SimulationResult(
        model=config.model.name,
        hardware=config.hardware.name,
        engine=config.engine,
        policy=config.scheduler.policy,
        num_prefill=config.num_prefill,
        num_decode=config.num_decode,
        num_nodes=simulation.num_nodes,
        node_hours=round(sum(paid_s.values()) * simulation.cost.node_share / 3600, 4),
        fitted=config.hardware.remark,
        instance=simulation.cost.described,
        seed=config.seed,
        duration_s=round(duration_s, 3),
        ttft_slo_s=config.ttft_slo_s,
        tbt_slo_ms=round(1e3 * config.tbt_slo_s, 3),
        requests=_counts(simulation),
        ttft_s=Spread.of(ttfts),
        tbt_ms=Spread.of(gaps, 1e3),
        tbt_slow10_ms=Spread.of(slow, 1e3),
        effective_requests=effective,
        effective_ratio=round(effective / len(requests), 4),
        ttft_inside_ratio=round(
            sum(ttft_s <= config.ttft_slo_s for ttft_s in ttfts) / len(requests), 4
        ),
        effective_by_tbt_ms={
            str(limit): round(_num_effective(simulation, limit / 1e3) / len(requests), 4)
            for limit in (100, 200, 300)
        },
        goodput_rps=round(effective / duration_s, 4),
        cache=_cache(simulation),
        prefill_busy_s=round(busy[Role.PREFILL], 3),
        decode_busy_s=round(busy[Role.DECODE], 3),
        prefill_utilisation=_share(busy[Role.PREFILL], paid_s[Role.PREFILL]),
        decode_utilisation=_share(busy[Role.DECODE], paid_s[Role.DECODE]),
        prefill_s_per_request=_share(busy[Role.PREFILL], len(ttfts)),
        wasted_prefill_tokens=sum(
            r.arrival.line.input_length - r.num_cached_tokens for r in wasted
        ),
        transfer_bytes=simulation.world.network.num_bytes_moved,
        load_swing=_swing(measures.timeline),
        replicas=_by_rank([moment.replicas for moment in measures.timeline]),
        holders=_by_rank([moment.holders for moment in measures.timeline]),
        ttft_histogram_s=_histogram(np.asarray(ttfts), 0.05, 500.0),
        tbt_histogram_ms=_histogram(gaps * 1e3, 5.0, 20_000.0),
        timeline=measures.timeline,
        num_events=simulation.world.heap.num_run,
    )


def _num_effective(simulation: Simulation, tbt_slo_s: float) -> int:
    limit_s = simulation.config.ttft_slo_s
    return sum(r.inside(limit_s, tbt_slo_s) for r in simulation.measures.requests)


def _counts(simulation: Simulation) -> RequestCounts:
    measures = simulation.measures
    requests = measures.requests
    before = sum(r.refused is not None for r in requests)
    others = [r for r in requests if not r.completed and r.refused is None]
    after = sum(r.shed for r in others)
    return RequestCounts(
        total=len(requests),
        completed=measures.num_completed,
        rejected=before + after,
        rejected_before_prefill=before,
        rejected_after_prefill=after,
        failed=len(others) - after,
        reasons=dict(sorted(measures.rejected.items())),
    )


def _cache(simulation: Simulation) -> CacheFigures:
    measures = simulation.measures
    counters: dict[str, float] = {}
    for worker in simulation.world.workers.values():
        if isinstance(worker.machine, PrefillWorker | DecodeWorker):
            for name, value in worker.machine.instance.load().counters.items():
                counters[name] = counters.get(name, 0.0) + value
    per_token = simulation.layout.kv_bytes_per_token
    local = round(counters.get("fetch_local_bytes", 0.0) / per_token)
    remote = round(counters.get("fetch_remote_bytes", 0.0) / per_token)
    total = measures.prompt_tokens
    return CacheFigures(
        hit_tokens=measures.hit_tokens,
        total_tokens=total,
        hit_rate=_share(measures.hit_tokens, total),
        by_tier={
            "hbm": max(0, measures.hit_tokens - local - remote),
            "pool_local": local,
            "pool_remote": remote,
        },
    )


def _busy_s(simulation: Simulation, role: Role) -> float:
    runners = simulation.world.runners(role)
    return sum(runner.busy_s for runner in runners if isinstance(runner, SimRunner))


def _swing(timeline: list[Moment]) -> float:
    """Return how much the pools' loads move against each other, the anti-phase of early rejection
    (arXiv 2407.00079, section 7).
    """
    gaps = [moment.prefill_load - moment.decode_load for moment in timeline]
    moves = [abs(after - before) for before, after in pairwise(gaps)]
    return round(sum(moves) / len(moves), 4) if moves else 0.0


def _by_rank(counts: list[list[float]]) -> dict[str, float]:
    late = counts[len(counts) // 2 :]
    return {
        str(rank): round(sum(one[i] for one in late) / len(late), 2) if late else 0.0
        for i, rank in enumerate(RANKS)
    }


def _histogram(values: NDArray[np.float64], low: float, high: float) -> Histogram:
    edges = np.geomspace(low, high, NUM_BINS + 1)
    counts, _ = np.histogram(np.clip(values, low, high), edges)
    return Histogram(edges=[float(f"{e:.4g}") for e in edges], counts=counts.tolist())


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
