"""The recipes' requests and shapes as they are simulated; figures themselves are in
benchmarks/README.md.
"""

from __future__ import annotations

import math

import msgspec
import pytest

from benchmarks.recipes import (
    BATCH_SHAPES,
    GOAL_WAYS,
    GOALS,
    H800X16,
    RECIPES,
    THINKING,
    Goal,
    Published,
    Recipe,
    kv_tokens,
    play,
    play_goal,
    workload,
)
from mooncake.base import Shape

RUNS = [(recipe, run) for recipe in RECIPES for run in recipe.runs]


@pytest.mark.parametrize(("recipe", "run"), RUNS, ids=str)
def test_requests_are_those_of_the_recipe(recipe: Recipe, run: Published) -> None:
    wanted = run.output_tokens
    requests = workload(recipe, wanted, 1000, seed=0)
    lines = [arrival.line for arrival in requests.arrivals]
    assert {line.input_length for line in lines} == {recipe.input_tokens}
    assert max(requests.output_lengths) <= recipe.output_tokens
    assert sum(requests.output_lengths) / 1000 == pytest.approx(wanted, rel=0.1)
    blocks = [block for line in lines for block in line.hash_ids]
    assert len(set(blocks)) == len(blocks), "no prompt shares a prefix"
    total = run.requests_per_s * (recipe.input_tokens + wanted)
    assert total == pytest.approx(run.total_tokens_per_s, rel=0.025)


def test_a_recipe_is_played_to_its_end() -> None:
    run = THINKING.runs[1]
    requests = workload(THINKING, run.output_tokens, 8, seed=0)
    result, output_rate = play(THINKING, run.shape, requests, num_prefill=1)
    assert result.requests.completed == 8
    assert result.num_nodes == 2
    assert output_rate > 0
    assert int(kv_tokens(result).replace(",", "")) == pytest.approx(run.kv_tokens, rel=0.12)


@pytest.mark.parametrize(("shape", "num_prefill"), BATCH_SHAPES, ids=str)
def test_a_batch_is_played_on_two_nodes_for_each_engine(shape: Shape, num_prefill: int) -> None:
    recipe = msgspec.structs.replace(H800X16, rate=math.inf, max_num_seqs=512, output_tokens=20)
    requests = workload(recipe, 20, 5, seed=0)
    result, _ = play(recipe, shape, requests, num_prefill=num_prefill)
    assert result.requests.completed == 5
    assert result.num_nodes == 2 * (1 + num_prefill)
    assert 0 < result.decode_utilisation <= 1


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.role)
def test_the_goal_is_simulated(goal: Goal) -> None:
    """On two nodes, few sequences: faster cards give more, and so do sends that are hidden where
    they take no less than products.
    """
    few = msgspec.structs.replace(goal, num_each=5)
    rates = [play_goal(few, sends, link, 2) for _, sends, link in GOAL_WAYS]
    assert rates[0] < rates[2], "cards"
    assert rates[1] <= rates[3]
    if goal.role == "prefill":
        assert rates[0] < rates[1], "hidden"
        assert rates[2] < rates[3]
