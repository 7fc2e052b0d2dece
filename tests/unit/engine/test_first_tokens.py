"""Which prompts wait so that most first tokens come in time, and what long gaps streams afford."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from mooncake.base import CostSample
from mooncake.engine.cost import StepCostModel
from mooncake.engine.prompt_time import (
    PATIENCE,
    SLACK,
    Allowance,
    Prompt,
    efficient_chunk,
    postponed,
)
from mooncake.telemetry.stats import slow_gap_mean
from tests.support.engine.engines import ROOMY

CONFIG = replace(ROOMY, first_token_s=1.0, max_chunk_tokens=1024, max_batched_tokens=1024)
LIMIT_S, USUAL_S = 0.12, 0.03


def cost(fixed_s: float) -> StepCostModel:
    """Return the cost model of a machine on which a token of a prompt takes 1 ms."""
    return StepCostModel(
        [
            CostSample(new, context, 1, fixed_s + 0.001 * new)
            for new in (1, 16, 256, 1024)
            for context in (0, 1000)
        ]
    )


COST = cost(0.001)


def prompt(num_tokens: int, since_s: float = 0.0, *, is_batch: bool = False) -> Prompt:
    return Prompt(since_s, num_tokens, 0, is_batch)


def test_nobody_is_postponed_while_all_can_be_in_time() -> None:
    assert postponed(CONFIG, COST, [prompt(600), prompt(500)], 0.0) == set()
    assert postponed(replace(CONFIG, first_token_s=None), COST, [prompt(9000)], 0.0) == set()


def test_the_longest_that_keeps_others_from_being_in_time_is_postponed() -> None:
    assert postponed(CONFIG, COST, [prompt(300), prompt(900), prompt(400)], 0.0) == {1}
    assert postponed(CONFIG, COST, [prompt(400), prompt(500), prompt(900)], 0.0) == {2}
    assert postponed(CONFIG, COST, [prompt(5000)], 0.0) == {0}


def test_a_prompt_that_was_postponed_for_long_goes_first_again() -> None:
    late = [prompt(900), prompt(200, PATIENCE)]
    assert postponed(CONFIG, COST, late, PATIENCE - 0.1) == {0}
    assert postponed(CONFIG, COST, late, PATIENCE + 0.1) == set()


def test_batch_has_more_time() -> None:
    assert postponed(CONFIG, COST, [prompt(5000, is_batch=True)], 0.0) == set()


@pytest.mark.parametrize("seed", range(20))
def test_no_order_has_more_first_tokens_in_time(seed: int) -> None:
    random = Random(seed)
    line = [prompt(random.randrange(50, 900), random.uniform(-1, 0)) for _ in range(6)]
    line.sort()

    def num_in_time(order: tuple[int, ...]) -> int:
        ready_s, count = 0.0, 0
        for place in order:
            ready_s += COST.prefill_s(line[place].num_tokens, 0, CONFIG.max_chunk_tokens)
            count += ready_s <= line[place].due_s(CONFIG, SLACK)
        return count

    left_out = postponed(CONFIG, COST, line, 0.0)
    kept = tuple(place for place in range(6) if place not in left_out)
    assert num_in_time(kept) == len(kept)
    assert len(kept) == max(map(num_in_time, itertools.permutations(range(6))))


def test_a_chunk_is_efficient_when_a_steps_own_time_is_a_small_part_of_it() -> None:
    assert efficient_chunk(CONFIG, cost(0.0201)) == 256
    assert efficient_chunk(CONFIG, cost(0.5)) == 1024


def test_a_young_stream_affords_no_gap_above_the_limit() -> None:
    assert Allowance().longest_s(10, LIMIT_S, USUAL_S) == LIMIT_S
    assert Allowance().longest_s(100, LIMIT_S, LIMIT_S) == LIMIT_S
    assert Allowance().longest_s(100, LIMIT_S, USUAL_S) == pytest.approx(0.12 + 9 * 0.09)


@pytest.mark.parametrize("seed", range(20))
def test_whenever_a_stream_ends_the_mean_of_its_slowest_tenth_keeps_the_limit(seed: int) -> None:
    random, allowance = Random(seed), Allowance()
    now, gaps = 0.0, []
    allowance.count(now, LIMIT_S)
    for num_tokens in range(1, 400):
        longest_s = allowance.longest_s(num_tokens, LIMIT_S, USUAL_S)
        gap_s = longest_s if longest_s > LIMIT_S and random.random() < 0.1 else USUAL_S
        now += gap_s
        gaps.append(gap_s)
        allowance.count(now, LIMIT_S)
        assert slow_gap_mean(gaps) <= LIMIT_S + 1e-9
