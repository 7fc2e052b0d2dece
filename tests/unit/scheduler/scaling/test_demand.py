"""What clients ask for, summed up over requests and gateways."""

from __future__ import annotations

import pytest

from mooncake.base import CostSample
from mooncake.engine.cost import StepCostModel
from mooncake.scheduler.scaling.policy import DemandMeter, Offered


class Cost(StepCostModel):
    """A millisecond for each token to compute."""

    def prefill_s(self, num_new_tokens: int, num_context_tokens: int, chunk_tokens: int) -> float:
        return num_new_tokens / 1e3


def test_a_request_counts_with_what_is_left_to_compute() -> None:
    meter = DemandMeter()
    meter.offer(3000, 1000, 100.0, Cost(), 512)
    assert meter.take() == Offered(1.0, 2.0, 4.0, 100.0, 100.0 * 3050)
    assert meter.take() == Offered(), "each request counts once"


def test_of_a_refused_one_the_usual_share_is_cached() -> None:
    meter = DemandMeter()
    meter.offer(4000, 1000, 10.0, Cost(), 512)
    meter.take()
    meter.offer(1000, None, 10.0, Cost(), 512)
    assert meter.take().prefill_s == pytest.approx(0.75)


def test_gateways_know_one_anothers_demand_from_when_they_met() -> None:
    meter = DemandMeter()
    meter.on_peer("b", [7.0, 7.0, 7.0, 7.0, 7.0])
    assert meter.take() == Offered(), "it came before"
    meter.on_peer("b", [9.0, 8.0, 7.0, 7.0, 7.0])
    meter.offer(1000, 0, 10.0, Cost(), 512)
    assert meter.take()[:2] == (3.0, 2.0)
    meter.on_peer("b", [1.0, 0.5, 0.25, 4.0, 4.0])
    assert meter.take().requests == 1.0, "it was started again"
    meter.forget("b")
    assert meter.take() == Offered()


@pytest.mark.parametrize("sums", [[], [1.0], [float("nan")] * 5, [float("inf")] * 5, [-1.0] * 5])
def test_what_is_no_sum_is_ignored(sums: list[float]) -> None:
    meter = DemandMeter()
    meter.on_peer("b", [0.0] * 5)
    meter.on_peer("b", sums)
    assert meter.take() == Offered()


def test_a_fitted_model_says_how_long_a_prompt_takes() -> None:
    sample = CostSample(num_new_tokens=1000, num_context_tokens=0, num_sequences=1, seconds=0.5)
    meter = DemandMeter()
    meter.offer(1000, 0, 10.0, StepCostModel([sample]), 1000)
    assert meter.take().prefill_s == pytest.approx(0.5, rel=0.2)
