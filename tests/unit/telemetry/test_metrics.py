"""Every series is set by something, and says what happened."""

from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from mooncake.base import FinishReason, Role, WorkerLoad
from mooncake.base.request import CacheHits, CacheMisses, CacheUse
from mooncake.telemetry.events import (
    Accepted,
    BatchesSeen,
    Finished,
    FirstToken,
    LoopHeld,
    Placed,
    Refused,
    ReplicasWanted,
    Requeued,
    Tokens,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from mooncake.telemetry.metrics import Metrics
from mooncake.telemetry.series import MAX_GONE_WORKERS, BuildInfo

CACHE = CacheUse(hits=CacheHits(hbm=30, ssd=10), misses=CacheMisses(evicted=50))


def families(metrics: Metrics) -> Iterator[Metric]:
    yield from text_string_to_metric_families(metrics.render(for_operator=True).decode())


def value(metrics: Metrics, series: str, /, **labels: str) -> float | None:
    """Return one sample by its full name."""
    for family in families(metrics):
        for sample in family.samples:
            wanted = {"model_name": "k2", **labels}
            if sample.name == f"mooncake:{series}" and sample.labels == wanted:
                return sample.value
    return None


def place(metrics: Metrics, name: str, at_s: float, attempt: int = 1) -> None:
    metrics.record(
        Placed(
            request_id=name,
            at_s=at_s,
            attempt=attempt,
            prefill="p0" if attempt == 1 else None,
            decode="d0",
            predicted_ttft_s=0.4,
            predicted_tbt_s=0.05,
            num_cached_tokens=10,
            num_fetch_blocks=3,
        )
    )


def token(metrics: Metrics, name: str, at_s: float, start: int, count: int = 1) -> None:
    if start == 0:
        metrics.record(
            FirstToken(
                request_id=name, at_s=at_s, worker_id="p0", num_cached_tokens=40, cache=CACHE
            )
        )
    metrics.record(
        Tokens(request_id=name, at_s=at_s, start=start, num_tokens=count, worker_id="d0")
    )


def finish(
    metrics: Metrics, name: str, at_s: float, reason: FinishReason, status: int = 200
) -> None:
    metrics.record(
        Finished(
            request_id=name,
            at_s=at_s,
            reason=reason,
            num_prompt_tokens=100,
            num_output_tokens=4,
            num_cached_tokens=40,
            status=status,
        )
    )


def accept(metrics: Metrics, name: str, at_s: float, ttft: float = 9.0, tbt: float = 9.0) -> None:
    metrics.record(
        Accepted(
            request_id=name,
            at_s=at_s,
            num_prompt_tokens=100,
            max_tokens=16,
            tenant="alice",
            ttft_slo_s=ttft,
            tbt_slo_s=tbt,
        )
    )


def report(
    metrics: Metrics,
    at_s: float,
    role: Role = Role.DECODE,
    worker_id: str | None = None,
    **counters: float,
) -> None:
    load = WorkerLoad(
        num_running=3,
        num_waiting=2,
        num_queued_tokens=500,
        num_context_tokens=900,
        num_free_blocks=25,
        num_total_blocks=100,
        num_cached_blocks=5,
        counters=counters,
    )
    metrics.record(
        WorkerReported(
            worker_id=worker_id or ("kv0" if role is Role.KVSTORE else "d0"),
            at_s=at_s,
            role=role,
            load=load,
            cost_error_ratio=0.1,
        )
    )


@pytest.fixture
def busy() -> Metrics:
    """Return metrics after a day in short: successes, a resumption, a failure, refusals, losses."""
    metrics = Metrics("k2")
    metrics.record(WorkerJoined(worker_id="d0", at_s=0.0, role=Role.DECODE, num_blocks=100))
    metrics.record(WorkerJoined(worker_id="p0", at_s=0.0, role=Role.PREFILL, num_blocks=100))
    metrics.record(Refused(request_id="x", at_s=0.0, status=429, reason="ttft_limit"))
    metrics.record(LoopHeld(at_s=0.5, held_s=0.03))
    metrics.record(BatchesSeen(at_s=0.6, num_batches=2, num_lines_asked=8, num_lines_left=90))
    metrics.record(ReplicasWanted(at_s=0.5, role=Role.DECODE, now=1, wanted=2))
    accept(metrics, "a", 1.0)
    place(metrics, "a", 1.01)
    token(metrics, "a", 1.5, 0)
    token(metrics, "a", 1.6, 1)
    metrics.record(
        Requeued(request_id="a", at_s=1.7, attempt=1, reason="lost", num_output_tokens=2)
    )
    place(metrics, "a", 1.7, attempt=2)
    token(metrics, "a", 2.6, 2, count=2)
    finish(metrics, "a", 2.7, FinishReason.STOP)
    accept(metrics, "b", 2.0)
    finish(metrics, "b", 3.0, FinishReason.ERROR, status=503)
    accept(metrics, "running", 4.0)
    place(metrics, "running", 4.0)
    token(metrics, "running", 4.4, 0)
    accept(metrics, "waiting", 4.0)
    report(
        metrics,
        4.0,
        preemptions=1,
        blocks_fetched=7,
        blocks_prefetched=3,
        blocks_put=9,
        fetches_failed=1,
        steps=9,
    )
    metrics.record(
        WorkerJoined(worker_id="kv0", at_s=0.0, role=Role.KVSTORE, num_blocks=100, node_id="n")
    )
    report(
        metrics, 4.0, blocks_fetched_corrupt=1, blocks_pushed_compared=5, blocks_pushed_corrupt=2
    )
    drafted = {"drafts": 3, "draft_tokens": 12, "accepted_tokens": 7}
    drafted |= {"accepted_tokens_per_pos_0": 3, "accepted_tokens_per_pos_11": 1}
    report(metrics, 4.0, **{f"spec_decode_num_{name}": n for name, n in drafted.items()})
    report(metrics, 4.0, Role.KVSTORE, blocks_evicted=2, blocks_put=9)
    metrics.record(WorkerLeft(worker_id="p0", at_s=5.0, role=Role.PREFILL, reason="died"))
    return metrics


def test_accepted_drafts_are_counted_by_position(busy: Metrics) -> None:
    [family] = (f for f in families(busy) if f.name.endswith("accepted_tokens_per_pos"))
    found = {s.labels["position"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert found == {"0": 3, "11": 1}


def test_every_series_is_set_by_something(busy: Metrics) -> None:
    for family in families(busy):
        samples = [s for s in family.samples if not s.name.endswith("_bucket")]
        assert samples, f"{family.name} has no sample"
        assert any(sample.value > 0 for sample in samples), f"{family.name} is never set"
        assert family.documentation
        assert family.name.startswith("mooncake:")


@pytest.mark.parametrize(
    "name",
    [
        "mooncake:time_to_first_token_seconds_bucket",
        "mooncake:inter_token_latency_seconds_bucket",
        "mooncake:e2e_request_latency_seconds_bucket",
        "mooncake:num_requests_running",
        "mooncake:num_requests_waiting",
        "mooncake:kv_cache_usage_perc",
        "mooncake:prompt_tokens_total",
        "mooncake:generation_tokens_total",
        "mooncake:prefix_cache_queries_total",
        "mooncake:prefix_cache_hits_total",
        "mooncake:num_preemptions_total",
        "mooncake:spec_decode_num_drafts_total",
        "mooncake:spec_decode_num_draft_tokens_total",
        "mooncake:spec_decode_num_accepted_tokens_total",
        "mooncake:spec_decode_num_accepted_tokens_per_pos_total",
        "mooncake:request_success_total",
        "mooncake:request_queue_time_seconds_bucket",
        "mooncake:request_prefill_time_seconds_bucket",
        "mooncake:request_decode_time_seconds_bucket",
    ],
)
def test_vllm_dashboards_find_their_names(busy: Metrics, name: str) -> None:
    assert name in {sample.name for family in families(busy) for sample in family.samples}


def test_counts(busy: Metrics) -> None:
    assert value(busy, "generation_tokens_total") == 5
    assert value(busy, "prompt_tokens_total") == 200
    assert value(busy, "prompt_tokens_cached_total") == 80
    assert value(busy, "prompt_tokens_hit_total", tier="ssd") == 20
    assert value(busy, "prompt_tokens_missed_total", reason="evicted") == 100
    assert value(busy, "prompt_tokens_missed_total", reason="not_seen") == 0
    assert value(busy, "request_success_total", finished_reason="stop") == 1
    assert value(busy, "request_failure_total", status="503") == 1
    assert value(busy, "requests_rejected_total", reason="ttft_limit", status="429") == 1
    assert value(busy, "requests_requeued_total") == 1
    assert value(busy, "requests_resumed_total") == 1
    assert value(busy, "placements_total", prompt_on="prefill") == 2
    assert value(busy, "placements_total", prompt_on="decode") == 1
    assert value(busy, "blocks_put_total") == 9, "what a pool counts is not added to it"
    assert value(busy, "pool_blocks_evicted_total") == 2
    assert value(busy, "workers_up", role="decode") == 1
    assert value(busy, "workers_up", role="prefill") == 0
    assert value(busy, "workers_lost_total", role="prefill") == 1


def test_engines_whose_node_has_no_pool_are_counted_while_others_have_one() -> None:
    metrics = Metrics("k2")

    def join(worker_id: str, role: Role, node: str) -> float | None:
        joined = WorkerJoined(worker_id=worker_id, at_s=0.0, role=role, num_blocks=1, node_id=node)
        metrics.record(joined)
        return value(metrics, "engines_without_pool")

    assert join("p0", Role.PREFILL, "a") == 0, "there is no pool at all"
    assert join("d0", Role.DECODE, "b") == 0
    assert join("g", Role.GATEWAY, "") == 0
    assert join("kv-a", Role.KVSTORE, "a") == 1
    assert join("kv-b", Role.KVSTORE, "b") == 0
    metrics.record(WorkerLeft(worker_id="kv-a", at_s=1.0, role=Role.KVSTORE, reason="died"))
    assert value(metrics, "engines_without_pool") == 1
    metrics.record(WorkerLeft(worker_id="p0", at_s=1.0, role=Role.PREFILL, reason="died"))
    assert value(metrics, "engines_without_pool") == 0


def test_gauges_follow_requests(busy: Metrics) -> None:
    assert value(busy, "num_requests_running") == 1
    assert value(busy, "num_requests_waiting") == 1
    finish(busy, "running", 9.0, FinishReason.ABORT)
    finish(busy, "waiting", 9.0, FinishReason.ABORT)
    assert value(busy, "num_requests_running") == 0
    assert value(busy, "num_requests_waiting") == 0
    assert value(busy, "request_success_total", finished_reason="abort") == 2


def test_latencies_are_measured_from_the_right_moments(busy: Metrics) -> None:
    finish(busy, "running", 9.0, FinishReason.ABORT)
    assert value(busy, "time_to_first_token_seconds_sum") == pytest.approx(0.5 + 0.4)
    assert value(busy, "inter_token_latency_seconds_sum") == pytest.approx(0.1 + 1.0)
    assert value(busy, "inter_token_latency_seconds_count") == 2
    assert value(busy, "request_queue_time_seconds_sum") == pytest.approx(0.01)
    assert value(busy, "request_tbt_seconds_sum") == pytest.approx(1.0)
    assert value(busy, "ttft_prediction_error_seconds_sum") == pytest.approx(0.09)
    assert value(busy, "ttft_prediction_error_ratio_sum") == pytest.approx(0.09 / 0.49)
    assert value(busy, "e2e_request_latency_seconds_sum") == pytest.approx(1.7 + 1.0 + 5.0)


@pytest.mark.parametrize(
    ("ttft", "tbt", "outcome"),
    [(1.0, 1.0, "met"), (0.4, 1.0, "ttft_missed"), (1.0, 0.2, "tbt_missed")],
)
def test_goodput_is_counted_by_outcome(ttft: float, tbt: float, outcome: str) -> None:
    metrics = Metrics("k2")
    accept(metrics, "r", 0.0, ttft, tbt)
    for index, at_s in enumerate((0.5, 0.6, 0.9)):
        token(metrics, "r", at_s, index)
    finish(metrics, "r", 1.0, FinishReason.LENGTH)
    assert value(metrics, "request_slo_total", outcome=outcome) == 1


def test_worker_counters_add_up_over_reports_and_restarts(busy: Metrics) -> None:
    report(busy, 5.0, preemptions=4)
    report(busy, 6.0, preemptions=4)
    assert value(busy, "num_preemptions_total") == 4
    busy.record(WorkerLeft(worker_id="d0", at_s=7.0, role=Role.DECODE, reason="died"))
    report(busy, 7.5, preemptions=50)
    assert value(busy, "num_preemptions_total") == 4
    busy.record(WorkerJoined(worker_id="d0", at_s=8.0, role=Role.DECODE, num_blocks=100))
    report(busy, 9.0, preemptions=2)
    assert value(busy, "num_preemptions_total") == 6
    assert value(busy, "worker_events_total", worker="d0", name="preemptions") == 6


def test_gauges_of_a_lost_worker_go_with_it(busy: Metrics) -> None:
    labels = {"worker": "d0", "role": "decode"}
    assert value(busy, "kv_cache_usage_perc", **labels) == 0.75
    busy.record(WorkerLeft(worker_id="d0", at_s=7.0, role=Role.DECODE, reason="died"))
    assert value(busy, "kv_cache_usage_perc", **labels) is None


def test_counters_of_workers_long_gone_go(busy: Metrics) -> None:
    """Gateways live longer than the names of workers that came and went."""

    def left(number: int) -> float | None:
        return value(busy, "worker_events_total", worker=f"d{number}", name="steps")

    for number in range(1, 201):
        name = f"d{number}"
        busy.record(WorkerJoined(worker_id=name, at_s=8.0, role=Role.DECODE, num_blocks=100))
        report(busy, 9.0, worker_id=name, steps=3)
        busy.record(WorkerLeft(worker_id=name, at_s=9.0, role=Role.DECODE, reason="scaled down"))
        if number > 1:  # comes and goes all the time
            busy.record(WorkerJoined(worker_id="d1", at_s=9.0, role=Role.DECODE, num_blocks=1))
            report(busy, 9.0, worker_id="d1", steps=2)
            busy.record(WorkerLeft(worker_id="d1", at_s=9.0, role=Role.DECODE, reason="died"))
    there = [number for number in range(2, 201) if left(number) is not None]
    assert there == list(range(201 - (MAX_GONE_WORKERS - 1), 201))
    assert left(1) == 3 + 199 * 2, "its count goes on"
    assert value(busy, "worker_events_total", worker="d0", name="steps") == 9, "it is up"
    assert value(busy, "worker_events_total", worker="kv0", name="blocks_evicted") == 2


def test_two_metrics_do_not_share_anything(busy: Metrics) -> None:
    assert value(Metrics("k2"), "generation_tokens_total") == 0


def test_events_of_unknown_requests_are_ignored() -> None:
    metrics = Metrics("k2")
    before = metrics.render()
    place(metrics, "ghost", 1.0)
    token(metrics, "ghost", 1.0, 0)
    finish(metrics, "ghost", 1.0, FinishReason.STOP)
    metrics.record(
        Requeued(request_id="ghost", at_s=1.0, attempt=1, reason="x", num_output_tokens=0)
    )
    assert metrics.render() == before


def test_no_series_tells_when_another_was_made() -> None:
    metrics = Metrics("k2")
    metrics.record(WorkerJoined(worker_id="d", at_s=0.0, role=Role.DECODE, num_blocks=1))
    assert b"_created" not in metrics.render()


def test_tokens_are_counted_by_tenant_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a key has no tenant. Tenants that are too many are counted together."""
    monkeypatch.setattr("mooncake.telemetry.series.MAX_TENANTS", 2)
    metrics = Metrics("k2")
    for name, tenant in zip("abcde", ["alice", "bob", "", "carl", "dave"], strict=True):
        metrics.record(
            Accepted(request_id=name, at_s=1.0, num_prompt_tokens=100, max_tokens=16, tenant=tenant)
        )
        finish(metrics, name, 2.0, FinishReason.STOP)
    for tenant, times in (("alice", 1), ("bob", 1), ("(others)", 2)):
        assert value(metrics, "tenant_prompt_tokens_total", tenant=tenant) == 100 * times
        assert value(metrics, "tenant_generation_tokens_total", tenant=tenant) == 4 * times
    assert value(metrics, "tenant_prompt_tokens_total", tenant="carl") is None
    assert value(metrics, "tenant_prompt_tokens_total", tenant="") is None
    assert b"alice" in metrics.render(for_operator=True)
    assert b"tenant" not in metrics.render()


def test_infos_are_series_whose_labels_say_it() -> None:
    build = BuildInfo(version="1.2.3", revision="c0ffee", role="gateway", layout="ab12")
    metrics = Metrics("k2", build)
    labels = {"version": "1.2.3", "revision": "c0ffee", "role": "gateway", "layout": "ab12"}
    assert value(metrics, "build_info", **labels) == 1
    assert value(metrics, "cache_config_info") is None


def test_batches_are_shown_as_they_were_last_seen(busy: Metrics) -> None:
    names = ("batches_running", "batch_lines_asked", "batch_lines_left")
    assert [value(busy, name) for name in names] == [2, 8, 90]
    busy.record(BatchesSeen(at_s=9.0, num_batches=0, num_lines_asked=0, num_lines_left=0))
    assert [value(busy, name) for name in names] == [0, 0, 0]


def test_the_number_of_replicas_that_there_should_be() -> None:
    metrics = Metrics("k2")
    assert value(metrics, "desired_replicas", role="prefill") is None
    for wanted in (3, 0):
        metrics.record(ReplicasWanted(at_s=1.0, role=Role.PREFILL, now=2, wanted=wanted))
        assert value(metrics, "desired_replicas", role="prefill") == wanted
