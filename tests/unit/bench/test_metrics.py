"""Figures of a run, checked against numbers worked out by hand."""

from __future__ import annotations

import statistics

import pytest

from mooncake.base import ConfigError
from mooncake.bench.endpoint import Output
from mooncake.bench.metrics import metrics_of, parse_goodput, spread


def output(start_s: float, ttft_s: float, itls_s: list[float], **more: object) -> Output:
    fields = {
        "num_prompt_tokens": 10,
        "num_output_tokens": 1 + len(itls_s),
        "start_s": start_s,
        "ttft_s": ttft_s,
        "latency_s": ttft_s + sum(itls_s),
        "itls_s": itls_s,
        **more,
    }
    return Output(**fields)  # type: ignore[arg-type]  # fields by name


FAST = output(100.0, 0.5, [0.1, 0.3])
SLOW = output(100.5, 1.0, [0.5], queued_s=0.2)
SINGLE = output(103.0, 0.25, [])
FAILED = Output(num_prompt_tokens=99, start_s=100.0, latency_s=9.0, error="500: no")
ALL = [FAST, SLOW, SINGLE, FAILED]


def test_counts_and_rates_leave_failures_out() -> None:
    metrics = metrics_of(ALL, 4.0, [], {})
    assert (metrics.num_completed, metrics.num_failed) == (3, 1)
    assert (metrics.num_input_tokens, metrics.num_output_tokens) == (30, 6)
    assert metrics.request_throughput == 0.75
    assert metrics.output_throughput == 1.5
    assert metrics.total_token_throughput == 9.0
    assert metrics.request_goodput is None


def test_tpot_leaves_single_tokens_out_and_itl_counts_every_gap() -> None:
    spreads = metrics_of(ALL, 4.0, [50, 100], {}).spreads
    assert spreads["tpot"].mean == pytest.approx(1000 * statistics.fmean([0.2, 0.5]))
    assert spreads["itl"].mean == pytest.approx(300)
    assert spreads["itl"].percentiles == [(50, pytest.approx(300)), (100, pytest.approx(500))]
    assert spreads["ttft"].median == pytest.approx(500)
    assert spreads["e2el"].percentiles[1] == (100, pytest.approx(1500))
    assert spreads["client_queue_time"].mean == pytest.approx(200 / 3)
    assert spreads["ttft"].std == pytest.approx(1000 * statistics.pstdev([0.5, 1.0, 0.25]))


def test_peaks() -> None:
    metrics = metrics_of(ALL, 4.0, [], {})
    # 100.5, 100.6, 100.9 fall into the first second, 101.5 into the second, 102.0 the third.
    assert metrics.max_output_tokens_per_s == 3
    assert metrics.max_concurrent_requests == 2


def test_one_that_ends_as_another_starts_has_made_way() -> None:
    one = output(0.0, 1.0, [])
    two = output(1.0, 1.0, [])
    assert metrics_of([two, one], 2.0, [], {}).max_concurrent_requests == 1


def test_goodput_wants_all_limits_met_and_takes_single_tokens_as_tpot_zero() -> None:
    limits = parse_goodput(["ttft:600", "tpot:200"])
    assert metrics_of(ALL, 4.0, [], limits).num_good == 2
    assert metrics_of(ALL, 4.0, [], parse_goodput(["e2el:300"])).num_good == 1
    assert metrics_of(ALL, 4.0, [], limits).request_goodput == 0.5


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:fast", "itl:5", "ttft:-1", "ttft:nan", ""])
def test_goodput_words_that_mean_nothing_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([word])


def test_nothing_finished_gives_zeros() -> None:
    metrics = metrics_of([FAILED], 1.0, [99], {"ttft": 1.0})
    assert (metrics.num_good, metrics.max_output_tokens_per_s) == (0, 0)
    assert metrics.spreads["ttft"] == spread([], [99])
    assert spread([], [99]).percentiles == [(99, 0.0)]
