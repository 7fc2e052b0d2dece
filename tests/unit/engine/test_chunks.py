"""Chunks of a pipeline: sums and longest steps, by the cost model."""

from __future__ import annotations

from itertools import product

import pytest

from mooncake.base import CostSample
from mooncake.engine.chunks import LEAST_SHARE, UNIT, chunk_sizes
from mooncake.engine.cost import StepCostModel

FIXED, TOKEN, PAIR, SQUARE = 2e-3, 1e-5, 3e-9, 2e-9


def model_of(pair: float, read: float = 0.0, stages: int = 4) -> StepCostModel:
    """Return a model fitted to steps of these costs."""
    return StepCostModel(
        [
            CostSample(
                new, context, 1,
                FIXED + TOKEN * new + pair * new * context + SQUARE * new * new + read * context,
            )
            for new in (64, 512, 4096, 8192)
            for context in (0, 4096, 65536)
        ],
        stages,
    )  # fmt: skip


def through_s(cost: StepCostModel, sizes: tuple[int, ...]) -> float:
    """Return when the last of these chunks is through all stages, step by step."""
    ends_s, context = [0.0] * cost.num_stages, 0
    for size in sizes:
        step_s, comes_s = cost.step_s(size, context, 1), 0.0
        for stage, free_s in enumerate(ends_s):
            ends_s[stage] = comes_s = max(comes_s, free_s) + step_s
        context += size
    return ends_s[-1]


def test_long_prompts_end_in_smaller_chunks() -> None:
    cost = model_of(PAIR)
    sizes = chunk_sizes(cost, 8192, 0, 131_072)
    assert sum(sizes) == 131_072
    assert sizes[0] == 8192
    assert list(sizes[:-1]) == sorted(sizes[:-1], reverse=True)
    assert 8192 // LEAST_SHARE <= sizes[-2] < 8192
    assert all(size % UNIT == 0 for size in sizes[:-1])
    assert through_s(cost, tuple(sizes)) < 0.95 * through_s(cost, (8192,) * 16)


@pytest.mark.parametrize("read", [1e-7, 1e-6, 1e-5])
def test_they_do_not_where_each_chunk_expands_the_whole_context(read: float) -> None:
    """Smaller chunks read it more often: never slower than chunks of one size."""
    cost = model_of(PAIR, read, stages=2)
    sizes = chunk_sizes(cost, 512, 0, 16_384)
    assert through_s(cost, tuple(sizes)) <= through_s(cost, (512,) * 32)
    if read == 1e-5:
        assert set(sizes) == {512}


@pytest.mark.parametrize("stages", [2, 4])
def test_little_is_lost_against_every_choice_of_sizes(stages: int) -> None:
    cost = model_of(3e-7, 1e-6, stages)
    units = product((64, 128), repeat=7)
    every = [sizes for sizes in units if sum(sizes) == 640]
    every += [sizes for sizes in product((64, 128), repeat=6) if sum(sizes) == 640]
    best_s = min(through_s(cost, sizes) for sizes in every)
    assert through_s(cost, tuple(chunk_sizes(cost, 128, 0, 640))) <= 1.05 * best_s


def test_what_was_computed_first_counts_as_context() -> None:
    cost = model_of(PAIR)
    whole = list(chunk_sizes(cost, 8192, 0, 131_072))
    rest = list(chunk_sizes(cost, 8192, whole[0], 131_072 - whole[0]))
    assert rest == whole[1:]


@pytest.mark.parametrize(
    ("most", "tokens", "sizes"),
    [(1024, 1, [1]), (1024, 1024, [1024]), (64, 130, [64, 64, 2]), (1, 3, [1, 1, 1]), (9, 0, [])],
)
def test_short_prompts_are_cut_as_without_stages(most: int, tokens: int, sizes: list[int]) -> None:
    assert list(chunk_sizes(model_of(PAIR), most, 10**6, tokens)) == sizes


def test_where_context_costs_nothing_chunks_are_as_large_as_may_be() -> None:
    assert list(chunk_sizes(model_of(0.0), 1024, 500_000, 10 * 1024)) == [1024] * 10
