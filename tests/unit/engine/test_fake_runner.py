"""The fake runner must catch what it is there to catch."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base.request import SamplingParams
from mooncake.engine.plan import LayerDone, StepPlan, StepResult, StepSlot
from tests.support.engine.engines import request
from tests.support.engine.fake_runner import (
    FakeRunner,
    History,
    Running,
    expected_output,
    sequence_of,
    small_layout,
)

LAYOUT = small_layout()
PROMPT = [1, 2, 3, 4, 5, 6]


def start(prompt: list[int] = PROMPT, sequence_id: int = 1, **sampling: Any) -> Running:
    return sequence_of(sequence_id, SamplingParams(**sampling), prompt)


def slot(first: int, tokens: list[int], pages: list[int], **fields: Any) -> StepSlot:
    sample = first + len(tokens) == len(PROMPT)
    values = {"sequence_id": 1, "start": first, "tokens": tokens, "pages": pages, "sample": sample}
    return StepSlot(**{**values, **fields})


def plan(step_id: int, *slots: StepSlot, **fields: Any) -> StepPlan:
    values: dict[str, Any] = {"starts": [], "ended": [], "slots": list(slots)}
    return StepPlan(step_id=step_id, **{**values, **fields})


def first_step(runner: FakeRunner) -> None:
    runner.submit(plan(0, slot(0, PROMPT[:5], [2, 0]), starts=[start()]))
    runner.poll()


def sampled(runner: FakeRunner) -> int:
    result = runner.poll()[-1]
    assert isinstance(result, StepResult)
    [[token]] = result.tokens.values()
    return token


def test_kv_and_tokens_are_those_of_the_oracle() -> None:
    runner = FakeRunner(LAYOUT, 4)
    first_step(runner)
    runner.check([2, 0], PROMPT[:5])
    runner.submit(plan(1, slot(5, PROMPT[5:], [2, 0])))
    assert sampled(runner) == expected_output(LAYOUT, request(PROMPT, max_tokens=1))[0]
    history = History(LAYOUT, PROMPT)
    assert bytes(runner.page_slice(1, 2)) == history.slice(1, 0)
    assert bytes(runner.page_slice(1, 0)[:16]) == history.slice(1, 1)


def test_steps_run_when_polled_and_report_each_layer() -> None:
    memory = memoryview(bytearray(LAYOUT.block_bytes * 4))
    runner = FakeRunner(LAYOUT, 4, memory=memory)
    runner.submit(plan(0, slot(0, PROMPT, [0, 1]), starts=[start()], report_layers=True))
    assert not any(memory)
    assert runner.poll(limit=1) == [LayerDone(step_id=0, layer=0)]
    assert any(runner.page_slice(0, 0))
    assert not any(runner.page_slice(1, 0))
    assert runner.poll(limit=1) == [LayerDone(step_id=0, layer=1)]
    assert runner.num_steps == 1
    assert isinstance(runner.poll()[0], StepResult)
    assert (runner.num_steps, runner.poll()) == (0, [])


@pytest.mark.parametrize("strict", [True, False])
def test_wrong_content_shows(strict: bool) -> None:
    runner = FakeRunner(LAYOUT, 4, strict=strict)
    first_step(runner)
    runner.page_slice(1, 2)[3] ^= 1
    runner.submit(plan(1, slot(5, PROMPT[5:], [2, 0])))
    if strict:
        with pytest.raises(AssertionError, match="block 0 is not in page 2, layer 1"):
            runner.poll()
    else:
        assert sampled(runner) != expected_output(LAYOUT, request(PROMPT, max_tokens=1))[0]


def test_a_failed_step_leaves_rubbish() -> None:
    runner = FakeRunner(LAYOUT, 4)
    runner.fail_next("no luck")
    runner.submit(plan(0, slot(0, PROMPT, [0, 1]), starts=[start()], report_layers=True))
    (result,) = runner.poll()
    assert isinstance(result, StepResult)
    assert (result.error, result.tokens) == ("no luck", {})
    with pytest.raises(AssertionError, match="block 0 is not in page 0"):
        runner.check([0, 1], PROMPT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(1, slot(5, [9], [2, 0])), "other tokens"),
        (plan(1, slot(5, [6], [2, 0], sample=False)), "sample is False"),
        (plan(1, slot(5, [6], [2])), "too few pages"),
        (plan(1, slot(5, [6], [2, 2])), "a page twice"),
        (plan(1, slot(5, [6], [3, 0])), "other pages"),
        (plan(1), "computes something"),
        (plan(1, slot(5, [], [2, 0])), "nothing to compute"),
        (plan(1, slot(5, [6], [2, 0]), ended=[4]), "never started"),
        (plan(1, slot(5, [6], [2, 0]), starts=[start()]), "started twice"),
        (
            plan(
                1,
                slot(5, [6], [2, 0]),
                slot(0, [8], [0], sequence_id=2, sample=True),
                starts=[start([8], 2)],
            ),
            "writes to another's page",
        ),
    ],
)
def test_plans_that_break_the_rules_are_caught(wrong: StepPlan, message: str) -> None:
    runner = FakeRunner(LAYOUT, 4)
    first_step(runner)
    runner.submit(wrong)
    with pytest.raises(AssertionError, match=message):
        runner.poll()


def test_ended_sequences_are_forgotten() -> None:
    runner = FakeRunner(LAYOUT, 4)
    first_step(runner)
    assert runner.known_ids == [1]
    again = slot(0, [7], [1], sequence_id=2, sample=True)
    runner.submit(plan(1, again, ended=[1], starts=[start([7], 2)]))
    runner.poll()
    assert runner.known_ids == [2]


def test_the_oracle_respects_its_limits() -> None:
    free = expected_output(LAYOUT, request(PROMPT, max_tokens=8))
    assert len(free) == 8
    assert expected_output(LAYOUT, request(PROMPT, max_tokens=8), max_model_len=9) == free[:3]
    stops = request(PROMPT, max_tokens=8, stop_token_ids=[free[1]])
    assert expected_output(LAYOUT, stops) == free[:2]
    later = request(PROMPT, max_tokens=8, stop_token_ids=[free[0]], min_tokens=2)
    assert free[0] not in expected_output(LAYOUT, later)[:2]
    other = expected_output(LAYOUT, request(PROMPT, max_tokens=8, seed=1))
    assert other != free
