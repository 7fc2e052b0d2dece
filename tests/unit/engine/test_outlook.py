"""First tokens that are predicted by planning the steps until they come."""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.base import CostSample
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.outlook import MOST_WORK, OpenPrompt, OpenStream, first_token_s

FREE = EngineConfig(
    num_blocks=1000, max_num_seqs=8, max_batched_tokens=1000, max_chunk_tokens=1000,
    max_model_len=8000, max_waiting=100,
)  # fmt: skip
LIMITED = dataclasses.replace(FREE, max_gap_s=0.12, first_token_s=4.0)
CHUNK, STREAM = (0.01, 0.001), (0.01, 0.002)
"""The seconds of a step, and of each token, of prompts and of streams."""


def model() -> StepCostModel:
    prompts = [CostSample(n, 0, 1, CHUNK[0] + CHUNK[1] * n) for n in (32, 128, 512, 1000)]
    streams = [CostSample(n, 100 * n, n, STREAM[0] + STREAM[1] * n).of_streams() for n in (1, 4, 8)]
    return StepCostModel(prompts + streams)


def prompt(num_tokens: int, since_s: float = 0.0, num_before: int = 0) -> OpenPrompt:
    return OpenPrompt(since_s, num_tokens, num_before, num_output=50, ready_s=since_s)


def test_alone_a_prompt_takes_as_long_as_its_chunks() -> None:
    cost = model()
    for config in (FREE, LIMITED):
        at_s = first_token_s(config, cost, [], [], prompt(2500, 7.0), 7.0, 7.0)
        assert at_s == pytest.approx(7.0 + cost.prefill_s(2500, 0, 1000))


def test_a_prompt_waits_for_what_it_fetches() -> None:
    asked = prompt(100, 1.0)
    asked.ready_s = 3.0
    cost = model()
    at_s = first_token_s(LIMITED, cost, [], [], asked, 1.0, 1.0)
    assert at_s == pytest.approx(3.0 + cost.prefill_s(100, 0, 1000))


@pytest.mark.parametrize("num_streams", [4, 200])
def test_a_prompt_waits_for_what_it_fetches_beside_more_streams_than_are_played(
    num_streams: int,
) -> None:
    asked = prompt(100, 1.0)
    asked.ready_s = 61.0
    cost = model()
    streams = [OpenStream(num_before=100, num_tokens=9, num_left=1e6) for _ in range(num_streams)]
    config = dataclasses.replace(LIMITED, max_num_seqs=500)
    at_s = first_token_s(config, cost, streams, [prompt(3000)], asked, 1.0, 0.0)
    assert at_s == pytest.approx(61.0 + cost.prefill_s(100, 0, 1000))


def test_a_prompt_that_cannot_be_in_time_does_not_delay_one_that_can() -> None:
    cost = model()
    alone_s = cost.prefill_s(100, 0, 1000)
    in_order_s = first_token_s(FREE, cost, [], [prompt(7000)], prompt(100, 1.0), 1.0, 0.0)
    assert in_order_s == pytest.approx(cost.prefill_s(7000, 0, 1000) + alone_s, rel=0.02)
    planned_s = first_token_s(LIMITED, cost, [], [prompt(7000)], prompt(100, 1.0), 1.0, 0.0)
    assert planned_s < 1.0 + cost.step_s(1000, 0, 1) + alone_s, "the present step, then it"


def test_a_prompt_beside_young_streams_is_computed_in_chunks_that_keep_the_limit() -> None:
    cost = model()
    streams = [OpenStream(num_before=100, num_tokens=2, num_left=500)]
    at_s = first_token_s(LIMITED, cost, streams, [], prompt(640, 0.0), 0.0, 0.0)
    assert at_s > cost.prefill_s(640, 0, 64), "chunks of 64, each with the stream"
    assert at_s < cost.prefill_s(640, 0, 64) + 10 * cost.streams_s(1, 110) + 0.1


def test_a_prompt_waits_until_streams_can_afford_its_chunk() -> None:
    cost = model()
    config = dataclasses.replace(LIMITED, max_gap_s=0.05)
    streams = [OpenStream(num_before=100, num_tokens=1, num_left=5)]
    at_s = first_token_s(config, cost, streams, [], prompt(64, 0.0), 0.0, 0.0)
    streams_s = 5 * cost.streams_s(1, 102)
    assert at_s == pytest.approx(streams_s + cost.prefill_s(64, 0, 1000), rel=0.05)


def test_a_prediction_looks_at_few_sequences_however_many_there_are() -> None:
    """Each has a cost to predict: so many calls of the cost model are made at most."""
    cost = model()
    calls = 0
    plain = cost.prefill_s

    def counted(num_new: int, num_before: int, chunk: int) -> float:
        nonlocal calls
        calls += 1
        return plain(num_new, num_before, chunk)

    cost.prefill_s = counted  # type: ignore[method-assign]
    config = dataclasses.replace(LIMITED, max_num_seqs=500)
    streams = [OpenStream(num_before=100, num_tokens=9, num_left=1e6) for _ in range(200)]
    prompts = [prompt(3000) for _ in range(200)]
    at_s = first_token_s(config, cost, streams, prompts, prompt(3000, 1.0), 1.0, 0.0)
    assert at_s > 1.0 + plain(3000, 0, 1000)
    assert calls <= 4 * MOST_WORK
