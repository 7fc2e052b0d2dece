"""What the cluster page shows of the last minute, from made-up events."""

from __future__ import annotations

import pytest

from mooncake.base import FinishReason
from mooncake.telemetry.events import Accepted, Finished, FirstToken, Refused, Tokens
from mooncake.telemetry.metrics import MAX_REFUSALS, MAX_SAMPLES, WINDOW_S, Metrics


def run(metrics: Metrics, name: str, *times: float, cached: int = 0) -> None:
    """One request: accepted, then a token at each further time, then finished."""
    accepted_s, first_s, *others = times
    metrics.record(Accepted(request_id=name, at_s=accepted_s, num_prompt_tokens=100, max_tokens=9))
    metrics.record(
        FirstToken(request_id=name, at_s=first_s, worker_id="p", num_cached_tokens=cached)
    )
    for start, at_s in enumerate([first_s, *others]):
        metrics.record(Tokens(request_id=name, at_s=at_s, start=start, num_tokens=1, worker_id="d"))
    metrics.record(
        Finished(
            request_id=name, at_s=times[-1], reason=FinishReason.STOP, num_prompt_tokens=100,
            num_output_tokens=len(others) + 1,
        )
    )  # fmt: skip


def test_nothing_has_happened() -> None:
    status = Metrics("m").recent.status(5.0)
    assert status.ttft_s_p50 is None
    assert status.tbt_s_p99 is None
    assert status.num_prompt_tokens == 0
    assert status.output_tokens_per_s == 0
    assert status.refusals == []


def test_latencies_and_hits_of_the_last_minute_only() -> None:
    metrics = Metrics("m")
    run(metrics, "old", 0.0, 9.0, 10.0, cached=100)
    run(metrics, "a", 100.0, 100.5, 100.75, cached=64)
    run(metrics, "b", 100.0, 101.5, 101.75)
    status = metrics.recent.status(102.0)
    assert status.ttft_s_p50 == pytest.approx(1.0)
    assert status.ttft_s_p99 == pytest.approx(0.5 + 0.99)
    assert status.tbt_s_p50 == pytest.approx(0.25)
    assert (status.num_prompt_tokens, status.num_cached_tokens) == (200, 64)
    assert metrics.recent.status(102.0 + WINDOW_S).ttft_s_p50 is None


def test_output_rate_is_of_whole_seconds_just_past() -> None:
    metrics = Metrics("m")
    run(metrics, "a", 10.0, 10.1, 10.2, 10.9, 11.5, 12.5)
    assert metrics.recent.status(13.2).output_tokens_per_s == pytest.approx(5 / 5)
    assert metrics.recent.status(12.6).output_tokens_per_s == pytest.approx(4 / 5)
    assert metrics.recent.status(16.0).output_tokens_per_s == pytest.approx(2 / 5)
    assert metrics.recent.status(99.0).output_tokens_per_s == 0


def test_rejections_are_kept_newest_first_and_bounded() -> None:
    metrics = Metrics("m")
    for number in range(MAX_REFUSALS + 5):
        metrics.record(
            Refused(request_id=f"r{number}", at_s=float(number), status=429, reason="ttft_limit")
        )
    refusals = metrics.recent.status(100.0).refusals
    assert len(refusals) == MAX_REFUSALS
    newest = refusals[0]
    assert (newest.request_id, newest.ago_s) == (f"r{MAX_REFUSALS + 4}", 100.0 - MAX_REFUSALS - 4)
    assert (newest.status, newest.reason) == (429, "ttft_limit")


def test_events_of_unknown_requests_are_ignored_and_nothing_is_left_of_finished_ones() -> None:
    metrics = Metrics("m")
    metrics.record(FirstToken(request_id="x", at_s=1.0, worker_id="p", num_cached_tokens=1))
    metrics.record(Tokens(request_id="x", at_s=1.0, start=3, num_tokens=1, worker_id="d"))
    assert metrics.recent.status(1.0).ttft_s_p50 is None
    for number in range(MAX_SAMPLES + 10):
        run(metrics, f"r{number}", 1.0, 2.0)
    assert metrics.recent.status(3.0).num_prompt_tokens == 100 * MAX_SAMPLES
    assert not metrics._live
