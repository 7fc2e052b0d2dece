"""A small trace through the whole simulated cluster: everything ends, outputs have their lengths,
the same seed gives the same bytes, and what is reported agrees with itself.
"""

from __future__ import annotations

import json

import msgspec
import pytest

from mooncake.base import ConfigError, FinishReason, Shape
from mooncake.kvstore.node.node import KvNode
from mooncake.sim.results.report import page
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.simulation import COUPLED, Simulation, SimulationConfig
from mooncake.sim.workload import Workload
from tests.support.sim.traces import hardware, model, sessions, simulation

TRACE = sessions(60)


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    played = simulation(TRACE)
    played.run()
    return result_of(played)


def test_every_request_ends_well_with_its_recorded_output() -> None:
    played = simulation(TRACE)
    played.run()
    requests = played.measures.requests
    assert [r.num_tokens for r in requests] == [line.output_length for line in TRACE]
    assert all(r.num_finals == 1 and r.final is FinishReason.STOP for r in requests)
    assert all(r.ttft_s is not None and r.ttft_s > 0 for r in requests)
    for _, machine in played.world.machines():
        machine.check_integrity()


def test_the_same_seed_gives_the_same_bytes(result: SimulationResult) -> None:
    again = simulation(TRACE)
    again.run()
    assert msgspec.json.encode(result_of(again)) == msgspec.json.encode(result)
    assert page(result_of(again)) == page(result)


def test_the_figures_agree_with_each_other(result: SimulationResult) -> None:
    counts = result.requests
    assert counts.total == len(TRACE) == counts.completed + counts.rejected + counts.failed
    assert result.effective_requests <= counts.completed
    assert sum(result.cache.by_tier.values()) >= result.cache.hit_tokens
    assert 0 < result.cache.hit_rate < 1
    assert result.cache.total_tokens == sum(line.input_length for line in TRACE)
    assert 0 < result.prefill_utilisation <= 1
    assert sum(result.ttft_histogram_s.counts) == counts.completed
    assert result.transfer_bytes > 0
    assert result.timeline
    assert result.timeline[-1].num_completed <= counts.completed
    assert result.ttft_s.p50 <= result.ttft_s.p90 <= result.ttft_s.p99


def test_a_global_pool_hits_more_than_random_local_caches() -> None:
    rates = {}
    for name, settings in {
        "global": {},
        "local": {"policy": "random", "fetch_remote": False},
    }.items():
        played = simulation(TRACE, num_prefill=4, scheduler=settings)
        played.run()
        rates[name] = result_of(played).cache.hit_rate
    assert rates["global"] > 1.5 * rates["local"]


@pytest.mark.parametrize("tier", ["ssd", "object"])
def test_a_tier_is_read_where_that_is_faster_than_computing(tier: str) -> None:
    trace, read, ttft_s = sessions(60, seed=1), [], []
    for bytes_per_s in (None, 2e8, 5e10):
        settings: dict[str, object] = {}
        if bytes_per_s is not None:
            settings = {
                f"{tier}_tokens": 1_000_000, f"{tier}_min_uses": 1,
                f"{tier}_bytes_per_s": bytes_per_s,
            }  # fmt: skip
        played = simulation(trace, pool_tokens=10_000, hbm_tokens=50_000, **settings)
        played.run()
        pools = [machine for _, machine in played.world.machines() if isinstance(machine, KvNode)]
        read.append(sum(pool.counters[f"{tier}_blocks_read"] for pool in pools))
        ttft_s.append(result_of(played).ttft_s.mean)
    without, slow, fast = ttft_s
    assert read[:2] == [0, 0], "a slow tier is written to, and not read"
    assert read[2] > 20
    assert slow < 1.5 * without
    assert fast < 0.8 * without


@pytest.mark.parametrize("engine", COUPLED)
def test_coupled_engines_play_the_same_trace(engine: str) -> None:
    played = simulation(TRACE, num_prefill=0, num_decode=3, engine=engine)
    played.run()
    outcome = result_of(played)
    assert outcome.requests.completed == len(TRACE)
    assert (outcome.cache.hit_tokens > 0) == engine.endswith("prefix")


def test_chunks_keep_gaps_short_where_whole_prompts_do_not() -> None:
    gaps = {}
    for engine in ("coupled", "coupled-chunked"):
        played = simulation(sessions(60, every_ms=100), 0, 2, engine=engine)
        played.run()
        gaps[engine] = result_of(played).tbt_ms.p99
    assert gaps["coupled-chunked"] < gaps["coupled"]


def test_limits_reject_and_each_way_of_rejecting_counts_its_own() -> None:
    trace = sessions(120, every_ms=250)
    for admission in ("late", "early", "predicted"):
        settings = {"admission": admission, "ttft_slo_s": 8.0, "tbt_slo_s": 0.027}
        played = simulation(trace, 4, 1, scheduler=settings)
        played.run()
        outcome = result_of(played)
        counts = outcome.requests
        assert counts.completed + counts.rejected == counts.total
        assert counts.rejected > 0
        assert sum(counts.reasons.values()) == counts.rejected_before_prefill
        if admission == "late":
            assert "tbt_limit" not in counts.reasons
            assert counts.rejected_after_prefill > 0
            assert outcome.wasted_prefill_tokens > 0
        else:
            assert counts.reasons["tbt_limit"] > 0
            assert counts.rejected_after_prefill == outcome.wasted_prefill_tokens == 0


def test_engines_that_plan_by_the_limits_keep_them_for_more_requests() -> None:
    trace = sessions(120, every_ms=60)
    kept = {}
    for planned in (False, True):
        played = simulation(trace, ttft_slo_s=4.0, tbt_slo_s=0.1, plan_by_limits=planned)
        played.run()
        outcome = result_of(played)
        assert outcome.requests.completed == len(trace), "nothing is refused for a target"
        kept[planned] = outcome.effective_requests
    assert kept[True] > kept[False]


def test_a_block_is_held_by_no_fewer_nodes_than_have_it_in_a_pool(
    result: SimulationResult,
) -> None:
    for moment in result.timeline:
        for copies, nodes in zip(moment.replicas, moment.holders, strict=True):
            assert copies <= nodes <= 2
    assert result.holders["10"] > 0


def test_a_report_is_one_file_with_its_plots(result: SimulationResult) -> None:
    text = page(result)
    assert text.count("<svg") == text.count("</svg>") == 9
    for wanted in (
        "Time to first token",
        "Load of both pools",
        "Replicas",
        "Nodes that hold hot blocks",
        "Rejections",
        "hit rate",
    ):
        assert wanted in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text


def test_the_json_is_stable_and_readable_again(result: SimulationResult) -> None:
    text = json.dumps(msgspec.to_builtins(result))
    assert msgspec.json.decode(text, type=SimulationResult) == result
    names = set(json.loads(text))
    assert {
        "requests", "ttft_s", "tbt_ms", "tbt_slow10_ms", "effective_requests", "goodput_rps",
        "cache", "prefill_busy_s", "transfer_bytes", "replicas", "timeline",
    } <= names  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "other"}, "engine"),
        ({"num_decode": 0}, "at least 1 decode"),
        ({"engine": "coupled"}, "a coupled engine"),
    ],
)
def test_impossible_clusters_are_refused(fields: dict[str, object], said: str) -> None:
    settings = {"num_prefill": 1, "num_decode": 1, **fields}
    with pytest.raises(ConfigError, match=said):
        SimulationConfig(model=model(), hardware=hardware(), **settings)  # type: ignore[arg-type]


def test_no_more_instances_are_played_than_share_the_experts() -> None:
    config = SimulationConfig(
        model=model(), hardware=hardware(), num_prefill=1, num_decode=1, num_played=2
    )
    with pytest.raises(ConfigError, match="2 of 1 instances"):
        Simulation(config, Workload.replay(TRACE))


def test_bytes_come_to_each_rank_that_holds_a_page() -> None:
    moved = []
    for shape in ("tp8", "tp8-dcp8"):
        config = SimulationConfig(
            model=model("kimi-k2-thinking"), hardware=hardware("h200x8"), shape=Shape.parse(shape),
            num_prefill=1, num_decode=1, pool_tokens=0,
        )  # fmt: skip
        played = Simulation(config, Workload.replay(sessions(6)))
        played.run()
        moved.append(played.world.network.num_bytes_moved)
    assert moved[0] == 8 * moved[1] > 0
