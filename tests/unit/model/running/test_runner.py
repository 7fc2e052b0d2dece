"""The runner: plans in, events out, one result a plan whatever happens."""

from __future__ import annotations

import math
import re
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from mooncake.base import Failure, InternalError, SamplingParams, TokenLogprobs
from mooncake.engine.plan import LayerDone, StepPlan, StepResult
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.sampler import Sampled
from mooncake.model.running.runner import _END_S, _STEP_S, ModelRunner, _await
from tests.support.engine.fake_runner import Running, sequence_of
from tests.support.model.tiny_models import kv_for, ours, random_tokens, slot, source_of, truth

BROKEN = 210
"""A prompt that begins with it cannot go on, as far as `GreedySampler` is concerned."""


class GreedySampler:
    """Takes the best token and remembers what it was told."""

    def __init__(self) -> None:
        self.history: dict[int, list[int]] = {}
        self.forgotten: list[int] = []
        self.logprob_rows: list[int] = []

    def start(self, start: Running) -> None:
        self.history[start.sequence_id] = [*start.prompt_tokens, *start.output_tokens]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)
        self.history.pop(sequence_id, None)

    def broken(self, sequence_ids: Sequence[int]) -> dict[int, Failure]:
        return {
            sequence_id: Failure.invalid("it is broken")
            for sequence_id in sequence_ids
            if self.history[sequence_id][0] == BROKEN
        }

    def sample(self, logits: torch.Tensor, sequence_ids: Sequence[int]) -> Sampled:
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(sequence_ids)
        tokens = []
        for row, sequence_id in zip(logits, sequence_ids, strict=True):
            token = int(row.argmax())
            self.history[sequence_id].append(token)
            tokens.append(token)
        return tokens, {}

    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], num: int
    ) -> list[TokenLogprobs]:
        self.logprob_rows.append(logits.shape[0])
        logprobs = torch.log_softmax(logits, dim=-1)
        return [
            TokenLogprobs(float(row[token]), 1 + int((row > row[token]).sum()), [])
            for row, token in zip(logprobs, next_tokens, strict=True)
        ]


@pytest.fixture(scope="module")
def reference():
    return truth("plain")


@pytest.fixture(scope="module")
def model(reference) -> KimiK2:
    return ours(source_of(reference))


@contextmanager
def running(model: KimiK2) -> Iterator[ModelRunner]:
    runner = ModelRunner(model, kv_for(model.spec), GreedySampler(), num_threads=1)
    try:
        yield runner
    finally:
        runner.close()


def results_of(runner: ModelRunner, count: int) -> tuple[list[StepResult], list[LayerDone]]:
    """Wait on the descriptor, as a driver does, until `count` steps have ended."""
    results: list[StepResult] = []
    layers: list[LayerDone] = []
    while len(results) < count:
        assert select.select([runner.fileno()], [], [], 60)[0], "the runner is silent"
        for event in runner.poll():
            if isinstance(event, StepResult):
                results.append(event)
            else:
                layers.append(event)
    return results, layers


def result_of(runner: ModelRunner) -> tuple[StepResult, list[LayerDone]]:
    """Wait for the only step under way."""
    results, layers = results_of(runner, 1)
    return results[0], layers


def start_of(sequence_id: int, prompt: list[int], **sampling: int) -> Running:
    return sequence_of(sequence_id, SamplingParams(**sampling), prompt)


def plan(step_id: int, slots: list, starts=(), ended=(), report_layers=False) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        starts=list(starts),
        slots=slots,
        ended=list(ended),
        report_layers=report_layers,
    )


def test_tokens_equal_transformers_over_steps_of_two_sequences(reference, model: KimiK2) -> None:
    prompts = {1: random_tokens(30, 1), 2: random_tokens(45, 2)}
    tables = {1: [0, 5, 2], 2: [9, 3, 7, 8]}
    expected = {
        key: reference.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for key, prompt in prompts.items()
    }
    found: dict[int, list[int]] = {1: [], 2: []}
    with running(model) as runner:
        runner.submit(
            plan(
                0,
                [slot(key, 0, prompts[key], tables[key]) for key in prompts],
                [start_of(key, prompts[key]) for key in prompts],
            )
        )
        for step in range(1, 7):
            result, _ = result_of(runner)
            assert result.error is None
            assert result.step_id == step - 1
            assert result.seconds > 0
            for key, tokens in result.tokens.items():
                found[key] += tokens
            slots = [
                slot(key, len(prompts[key]) + step - 1, found[key][-1:], tables[key])
                for key in prompts
            ]
            runner.submit(plan(step, slots))
        result_of(runner)
    assert found == expected


def test_layers_are_reported_in_order_and_before_the_result(model: KimiK2) -> None:
    with running(model) as runner:
        runner.submit(
            plan(4, [slot(1, 0, [1, 2, 3], [0])], [start_of(1, [1, 2, 3])], report_layers=True)
        )
        result, layers = result_of(runner)
    assert [event.layer for event in layers] == [0, 1, 2]
    assert {event.step_id for event in layers} == {4}
    assert result.tokens.keys() == {1}


def test_a_chunk_that_does_not_sample_gives_no_samples(model: KimiK2) -> None:
    with running(model) as runner:
        runner.submit(plan(1, [slot(1, 0, [1, 2], [0], sample=False)], [start_of(1, [1, 2, 3])]))
        assert result_of(runner)[0].tokens == {}


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([slot(9, 0, [1], [0])], r"sequences \[9\] were never started"),
        ([slot(1, 0, [1] * 17, [0])], "sequence 1: 17 tokens need 2 pages, the table has 1"),
        ([slot(1, 0, [1], [64])], r"page table \(64,\) names a page outside 0..63"),
        ([slot(1, 0, [1], [-1])], "names a page outside"),
        ([slot(1, 0, [], [0])], "sequence 1: a slot without tokens"),
        ([slot(1, 0, [211], [0])], "IndexError"),
        ([slot(1, 0, [1], [0]), slot(1, 1, [1], [0])], "sequence 1 has two slots"),
    ],
)
def test_a_bad_plan_ends_in_one_result_with_an_error(model: KimiK2, slots, message) -> None:
    with running(model) as runner:
        runner.submit(plan(1, slots, [start_of(1, [1])]))
        runner.submit(plan(2, [slot(1, 0, [1], [0])]))
        (failed, after), _ = results_of(runner, 2)
        assert failed.step_id == 1
        assert failed.tokens == {}
        assert failed.error is not None
        assert re.search(message, failed.error), failed.error
        assert after.step_id == 2
        assert after.error is None, "the runner goes on after a failed step"


def test_prompt_logprobs_of_every_chunk_make_the_whole_prompt(reference, model: KimiK2) -> None:
    prompt = random_tokens(50, seed=3)
    with torch.inference_mode():
        raw = reference(torch.tensor([prompt])).logits[0]
    logprobs = torch.log_softmax(raw, dim=-1)
    expected = [float(logprobs[at, prompt[at + 1]]) for at in range(49)]
    found: list[float] = []
    with running(model) as runner:
        runner.submit(
            plan(
                1,
                [slot(1, 0, prompt[:20], range(4), sample=False), slot(2, 0, [5, 6], [8])],
                [start_of(1, prompt, num_prompt_logprobs=0), start_of(2, [5, 6])],
            )
        )
        runner.submit(plan(2, [slot(1, 20, prompt[20:], range(4))]))
        results, _ = results_of(runner, 2)
        for result in results:
            assert list(result.prompt_logprobs) == [1]
            found += [entry.logprob for entry in result.prompt_logprobs[1]]
        assert results[1].tokens[1] == [int(raw[-1].argmax())]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)


def test_ended_sequences_are_forgotten_before_new_ones_start(model: KimiK2) -> None:
    sampler = GreedySampler()
    runner = ModelRunner(model, kv_for(model.spec), sampler)
    runner.submit(plan(1, [slot(1, 0, [3], [0])], [start_of(1, [3])]))
    runner.submit(plan(2, [], [start_of(1, [4, 5])], ended=[1]))
    runner.submit(plan(3, [], ended=[1]))
    runner.submit(plan(4, [slot(1, 0, [4], [0])]))
    results, _ = results_of(runner, 4)
    runner.close()
    assert sampler.forgotten == [1, 1]
    assert sampler.history == {}
    assert [result.error is None for result in results] == [True, True, True, False]


def test_the_descriptor_is_readable_exactly_while_events_wait(model: KimiK2) -> None:
    with running(model) as runner:
        assert not select.select([runner.fileno()], [], [], 0)[0]
        assert runner.poll() == []
        runner.submit(plan(1, []))
        assert select.select([runner.fileno()], [], [], 60)[0]
        assert len(runner.poll()) == 1
        assert not select.select([runner.fileno()], [], [], 0)[0]


def test_close_is_final_and_may_be_repeated(model: KimiK2) -> None:
    runner = ModelRunner(model, kv_for(model.spec), GreedySampler())
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(plan(1, []))


class StuckThread:
    """A thread in a step that does not end; nobody waits for it in fact."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "it would be waited for without end"
        self.waited_s += timeout


@pytest.mark.parametrize(
    ("lost_after_s", "limit_s", "what"),
    [
        (0.0, _END_S, "rank 1 has died, and the step that waits for it"),
        (60.0, 60.0 + _END_S, "rank 1 has died, and the step that waits for it"),
        (_STEP_S - 1.0, _STEP_S, "rank 1 has died, and the step that waits for it"),
        (math.inf, _STEP_S, "the running step"),
    ],
)
def test_the_end_of_a_step_is_not_awaited_for_ever(
    lost_after_s: float, limit_s: float, what: str
) -> None:
    """A rank may also be lost while its step is being waited for."""
    thread = StuckThread()

    def lost() -> str | None:
        return "rank 1 has died" if thread.waited_s >= lost_after_s else None

    with pytest.raises(InternalError, match=f"^{what} does not end$"):
        _await(thread, lost)  # type: ignore[arg-type]  # as far as it is used
    assert thread.waited_s == limit_s


def test_a_sequence_that_cannot_go_on_fails_alone(model: KimiK2) -> None:
    good, bad = random_tokens(5, 3), [BROKEN, *random_tokens(4, 4)]
    with running(model) as runner:
        slots = [slot(1, 0, good, [0]), slot(2, 0, bad, [1])]
        runner.submit(plan(0, slots, [start_of(1, good), start_of(2, bad)]))
        result, _ = result_of(runner)
    assert result.error is None
    assert result.failures == {2: Failure.invalid("it is broken")}
    assert result.tokens.keys() == {1}
