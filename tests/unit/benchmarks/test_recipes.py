"""The recipes' requests and shapes as they are simulated; figures themselves are in
benchmarks/README.md.
"""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.recipes import (
    GOALS,
    INPUT_TOKENS,
    MAX_OUTPUT_TOKENS,
    RUNS,
    Goal,
    Published,
    goal_seconds,
    play,
    workload,
)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.shape))
def test_requests_are_those_of_the_recipe(run: Published) -> None:
    wanted = run.output_tokens
    requests = workload(wanted, 1000, seed=0)
    lines = [arrival.line for arrival in requests.arrivals]
    assert {line.input_length for line in lines} == {INPUT_TOKENS}
    assert max(requests.output_lengths) <= MAX_OUTPUT_TOKENS
    assert sum(requests.output_lengths) / 1000 == pytest.approx(wanted, rel=0.1)
    blocks = [block for line in lines for block in line.hash_ids]
    assert len(set(blocks)) == len(blocks), "no prompt shares a prefix"
    total = run.requests_per_s * (INPUT_TOKENS + wanted)
    assert total == pytest.approx(run.total_tokens_per_s, rel=0.01)


def test_a_recipe_is_played_to_its_end() -> None:
    run = RUNS[1]
    result, output_rate = play(run, 8, num_prefill=1)
    assert result.requests.completed == 8
    assert result.num_nodes == 2
    assert output_rate > 0
    held = int(result.instance.split(", ", 1)[1].split(" ")[0].replace(",", ""))
    assert held == pytest.approx(run.kv_tokens, rel=0.12)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.role)
def test_the_goal_lies_between_both_bounds(goal: Goal) -> None:
    """GPUs alone would do more; computing and sending in turn would do less than is published."""
    gpus_s, network_s, tokens = goal_seconds(goal)
    assert tokens / gpus_s > goal.published > tokens / (gpus_s + network_s)
    one_node = goal_seconds(msgspec.structs.replace(goal, num_nodes=1))
    assert one_node[1] == 0.0, "all experts are here"
