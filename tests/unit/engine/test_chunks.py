"""Chunks of a pipeline take equal times, by the cost model."""

from __future__ import annotations

import pytest

from mooncake.base import CostSample
from mooncake.engine.chunks import LEAST_SHARE, UNIT, equal_chunk
from mooncake.engine.cost import StepCostModel

FIXED, TOKEN, PAIR, SQUARE = 2e-3, 1e-5, 3e-9, 2e-9


def model_of(pair: float, square: float) -> StepCostModel:
    """Return a model fitted to steps of these costs."""
    return StepCostModel(
        [
            CostSample(
                new, context, 1, FIXED + TOKEN * new + pair * new * context + square * new * new
            )
            for new in (64, 512, 4096, 8192)
            for context in (0, 4096, 65536)
        ]
    )


@pytest.mark.parametrize("context", [0, 1024, 4096, 8192, 100_000])
def test_a_chunk_takes_as_long_as_the_first(context: int) -> None:
    cost = model_of(PAIR, SQUARE)
    found = equal_chunk(cost, 8192, context)
    assert found % UNIT == 0
    whole = cost.step_s(8192, 0, 1)
    if found == 8192 // LEAST_SHARE:
        assert cost.step_s(found, context, 1) > whole
        return
    assert cost.step_s(found, context, 1) <= whole * 1.001
    if found < 8192:
        assert cost.step_s(found + UNIT, context, 1) > whole * 0.999


def test_chunks_shrink_and_not_to_nothing() -> None:
    cost = model_of(PAIR, SQUARE)
    sizes = [equal_chunk(cost, 8192, context) for context in range(0, 2_000_000, 50_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (8192, 8192 // LEAST_SHARE)


def test_where_context_costs_nothing_chunks_are_as_large_as_may_be() -> None:
    cost = model_of(0.0, 0.0)
    assert equal_chunk(cost, 1024, 1_000_000) > 900
    assert [equal_chunk(cost, most, 10**6) for most in (1, 63, 64)] == [1, 63, 64]
