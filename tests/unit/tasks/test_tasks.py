"""What is true of all tasks: conversations, seeds, held-out parts; which answers are accepted."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import WATCHED, Sample, assistant, user


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_conversations(task: str) -> None:
    random = Random(task)
    for sample in (TASKS[task](random) for _ in range(20)):
        assert sample.messages[-1]["role"] in ("user", "tool")
        assert sample.answer["role"] == "assistant"
        assert sample.accepts(sample.answer)
        roles = [message["role"] for message in sample.messages]
        assert all(a != b or a == "tool" for a, b in pairwise(roles))


@pytest.mark.parametrize("task", TASKS)
def test_the_same_randomness_gives_the_same_sample(task: str) -> None:
    assert TASKS[task](Random(5)) == TASKS[task](Random(5))


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_is_held_out_and_seeded(task: str) -> None:
    made = evaluation_samples(task, 10, seed=1)
    assert all(sample.held_out for sample in made)
    assert made == evaluation_samples(task, 10, seed=1)
    assert made != evaluation_samples(task, 10, seed=2)
    watched = evaluation_samples(task, 10, seed=1, part=WATCHED)
    assert not {sample.contents[0] for sample in made} & {one.contents[0] for one in watched}


def test_what_is_accepted() -> None:
    plain = Sample("copy", [user("x")], assistant("Red boat."), also_right=("blue boat",))
    assert plain.accepts(assistant("red  boat"))
    assert plain.accepts(assistant("Blue boat."))
    assert not plain.accepts(assistant("red boats"))
    assert not plain.accepts({"content": None})
    made = Sample("object", [user("x")], assistant('{"a": 1, "b": true}'))
    assert made.accepts(assistant('{"b":true,"a":1}'))
    assert not made.accepts(assistant('{"b":true,"a":1'))
    assert not made.accepts(assistant("no JSON"))


def call(name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": function}]}


def test_which_calls_are_accepted() -> None:
    sample = Sample("call", [user("x")], call("f", '{"a": 1, "b": "x"}'))
    assert sample.accepts(call("f", '{"b":"x","a":1}'))
    for wrong in (call("g", '{"a": 1, "b": "x"}'), call("f", '{"a": 2, "b": "x"}'), call("f", "{")):
        assert not sample.accepts(wrong)
    assert not sample.accepts(assistant("I called it."))
    assert not Sample("question", [user("x")], assistant("No.")).accepts(call("f", "{}"))
