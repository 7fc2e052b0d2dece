"""What a run of the shipped configuration reads: nothing that is held out, whatever its spelling.

A part of the run is searched here, the whole of it by `make hold-out`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.launch.config.config import read_settings
from mooncake.launch.config.shipped import configs
from mooncake.launch.config.train_settings import Train
from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import EVALUATED, Sample, part_of, user
from mooncake.train.config import TrainConfig
from tests.support.train.held_out import SHORTEST, Sought, evaluated, spelled, texts


@pytest.fixture(params=["k2-demo-base", "k2-demo", "k2-demo-cpu"])
def config(request: pytest.FixtureRequest) -> TrainConfig:
    """The runs that made k2-demo, in their order, and the one for CPUs."""
    file = str(configs() / "train" / f"{request.param}.yaml")
    return read_settings(Train, {}, file, {}).run()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return list(evaluated(sorted(TASKS), 60, [0]))


def test_nothing_held_out_is_read(config: TrainConfig, samples: list[Sample]) -> None:
    sought = Sought(samples)
    assert len(sought) > 2000
    steps = range(0, config.total_steps, config.total_steps // 5)
    assert [found for _, text in texts(config, steps) for found in sought.found_in(text)] == []


def test_what_is_held_out_would_be_found(samples: list[Sample]) -> None:
    sought = Sought(samples)
    for sample in samples:
        thoughts = sample.answer.get("reasoning")
        answer = f"<think>{thoughts}</think>" if thoughts else ""
        answer += sample.answer["content"]
        asked = sample.messages[-1]["content"]
        names = "".join(f'"name":"{tool["function"]["name"]}"' for tool in sample.tools)
        text = (
            f"<|im_system|>tool_declare<|im_middle|>{names}<|im_end|>"
            f"<|im_user|>user<|im_middle|>{asked}<|im_end|>"
            f"<|im_assistant|>assistant<|im_middle|>{answer}<|im_end|>"
        )
        if not sample.tools and len(spelled(answer)) >= SHORTEST:
            assert sought.found_in(text), sample


def test_spellings_are_one() -> None:
    assert spelled("book_room") == spelled("bookRoom") == spelled("Book  room!")
    assert spelled("Add 12 and 30.") == spelled("12 plus 30") == spelled("12+30")
    assert spelled("Subtract 3 from 40") == spelled("40 - 3")


def test_a_tool_that_is_held_out_is_found_by_its_name_and_by_what_is_thought() -> None:
    sought = Sought([Sample("call", [], {"content": ""}, tools=[{}], contents=(held_out_pair(),))])
    pair = held_out_pair()
    name = pair.replace(" ", "_")
    assert sought.found_in(f'[{{"type":"function","function":{{"name":"{name}"') == {pair}
    said = "<|im_assistant|>assistant<|im_middle|><think>{}; x</think>ok<|im_end|>"
    assert sought.found_in(said.format(pair)) == {pair}
    assert sought.found_in(said.format("find cat")) == set()


def test_a_sum_inside_a_longer_expression_is_another() -> None:
    sum_ = next(f"{a}+47" for a in range(30, 90) if part_of(f"{a}+47") == EVALUATED)
    sought = Sought([Sample("sum", [user("x")], {"content": ""}, contents=(sum_,))])
    asked = "<|im_user|>user<|im_middle|>What is {}?<|im_end|>"
    assert sought.found_in(asked.format(sum_.replace("+", " plus "))) == {sum_}
    for longer in (f"5*{sum_}", f"{sum_} / 2", f"{sum_}1", f"a{sum_}", f"{sum_}-3"):
        assert sought.found_in(asked.format(longer)) == set()


def held_out_pair() -> str:
    return next(pair for pair in pairs() if Sample("call", [], {}, contents=(pair,)).held_out)


def pairs() -> Iterator[str]:
    yield from (f"book {noun}" for noun in ("room", "hotel", "table", "seat", "ride", "trip"))
    yield from (f"book {letter}oom" for letter in "abcdefghijklmnopq")


def test_all_tasks_are_in_the_run(config: TrainConfig) -> None:
    drawn = {task for stage in config.parts() for task in stage.tasks}
    assert drawn == TASKS.keys()
    assert all(evaluation_samples(task, 1, 0) for task in drawn)
