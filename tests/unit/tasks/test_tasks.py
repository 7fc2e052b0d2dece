"""The first tasks, which the shipped k2-demo was trained on: their answers are right, their calls
fit their schemas; and what is true of all tasks.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import jsonschema
import pytest

from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import WATCHED, Sample, assistant, user

NUM = 200


def samples(task: str, number: int = NUM) -> list[Sample]:
    random = Random(task)
    return [TASKS[task](random) for _ in range(number)]


def asked(sample: Sample) -> str:
    text: str = sample.messages[-1]["content"]
    return text


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_conversations(task: str) -> None:
    for sample in samples(task, 20):
        assert sample.messages[-1]["role"] in ("user", "tool")
        assert sample.answer["role"] == "assistant"
        assert sample.accepts(sample.answer)
        roles = [message["role"] for message in sample.messages]
        assert all(a != b or a == "tool" for a, b in pairwise(roles))


@pytest.mark.parametrize("task", TASKS)
def test_the_same_randomness_gives_the_same_sample(task: str) -> None:
    assert TASKS[task](Random(5)) == TASKS[task](Random(5))


@pytest.mark.parametrize(("task", "sign"), [("addition", 1), ("subtraction", -1)])
def test_sums_are_right_and_so_is_every_step_thought(task: str, sign: int) -> None:
    for sample in samples(task):
        a, b = map(int, re.findall(r"\d+", asked(sample)))
        if sign < 0:
            assert a >= b
        assert int(sample.answer["content"]) == a + sign * b
        restated, _, steps = sample.answer["reasoning"].partition(":")
        assert restated == f"{a}{'+' if sign > 0 else '-'}{b}"
        digits = []
        for step in steps.split(","):
            left, right = step.split("=")
            assert sum(map(int, re.findall(r"[+-]?\d+", left))) == int(right)
            digits.append(right)
        if sign > 0:
            digits = [*(digit[-1] for digit in digits[:-1]), digits[-1]]
        assert int("".join(reversed(digits))) == a + sign * b


def test_sorted_and_counted_right() -> None:
    for sample in samples("sorting"):
        numbers = re.findall(r"\d+", asked(sample))
        assert sample.answer["content"].split(", ") == sorted(numbers, key=int)
    for sample in samples("counting"):
        said = sample.answer["reasoning"].split(", ")
        words = asked(sample).rstrip("?").split()
        assert [one.split()[0] for one in said] == words[-len(said) :]
        assert said[-1].split()[1] == sample.answer["content"]


def test_copies_are_in_what_is_asked() -> None:
    for sample in samples("copying"):
        assert asked(sample).endswith(sample.answer["content"])


def test_json_answers_are_objects_of_what_is_asked() -> None:
    for sample in samples("json"):
        for key, value in json.loads(sample.answer["content"]).items():
            assert key in asked(sample)
            assert str(value).lower() in asked(sample).lower() or isinstance(value, list)


def test_needles_are_in_the_text_once() -> None:
    for sample in samples("needle"):
        forms = r"[Cc]ode of (\w+)[.?]$|code does (\w+) have\?$"
        who = re.search(forms, asked(sample))
        assert who
        name = next(found for found in who.groups() if found)
        assert sample.answer["content"].startswith(f"The code of {name} is ")
        assert sample.messages[0]["content"].count(sample.answer["content"]) == 1
        [code] = sample.also_right
        assert sample.accepts({"content": code})
        assert not sample.accepts({"content": str(int(code) + 1)})


def test_what_is_recalled_was_said() -> None:
    for sample in samples("recall"):
        said = " ".join(m["content"] for m in sample.messages[:-1] if m["role"] == "user").lower()
        assert sample.answer["content"].rstrip(".").split()[-1].lower() in said


def test_calls_fit_the_declared_schemas() -> None:
    for sample in samples("tool_call", 400):
        [call] = sample.answer["tool_calls"]
        [declared] = [
            tool["function"]
            for tool in sample.tools
            if tool["function"]["name"] == call["function"]["name"]
        ]
        arguments = json.loads(call["function"]["arguments"])
        schema = {**declared["parameters"], "additionalProperties": False}
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(arguments, schema)
        assert list(arguments) == [key for key in schema["properties"] if key in arguments]
        text = asked(sample).lower()
        assert all(str(value).lower() in text for value in arguments.values())


def test_results_are_said_in_full() -> None:
    told = [sample for sample in samples("tool_result") if sample.task == "tool_result"]
    assert 0.5 * NUM < len(told) < NUM
    for sample in told:
        for key, value in json.loads(asked(sample)).items():
            assert f"the {key} is {value}" in sample.answer["content"].replace("The", "the", 1)


def test_ids_of_calls_count_through_a_conversation() -> None:
    for sample in samples("tool_result"):
        calls = [
            m["tool_calls"][0]["id"] for m in (*sample.messages, sample.answer) if "tool_calls" in m
        ]
        assert [name.rpartition(":")[2] for name in calls] == [str(n) for n in range(len(calls))]


def test_without_a_fitting_tool_none_is_called() -> None:
    for sample in samples("no_tool"):
        assert "tool_calls" not in sample.answer
        assert sample.tools


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_is_held_out_and_seeded(task: str) -> None:
    made = evaluation_samples(task, 10, seed=1)
    assert all(sample.held_out or task == "chat" for sample in made)
    assert made == evaluation_samples(task, 10, seed=1)
    assert made != evaluation_samples(task, 10, seed=2)
    watched = evaluation_samples(task, 10, seed=1, part=WATCHED)
    both = {sample.contents[:1] for sample in made} & {one.contents[:1] for one in watched}
    assert both <= {()}  # the first tasks have no contents


def test_about_one_of_eight_is_held_out() -> None:
    held_out = sum(sample.held_out for sample in samples("addition", 2000))
    assert 200 < held_out < 300


def test_what_is_accepted() -> None:
    plain = Sample("copying", [user("x")], assistant("Red boat."), "k", also_right=("blue boat",))
    assert plain.accepts(assistant("red  boat"))
    assert plain.accepts(assistant("Blue boat."))
    assert not plain.accepts(assistant("red boats"))
    assert not plain.accepts({"content": None})
    made = Sample("json", [user("x")], assistant('{"a": 1, "b": true}'), "k")
    assert made.accepts(assistant('{"b":true,"a":1}'))
    assert not made.accepts(assistant('{"b":true,"a":1'))
    assert not made.accepts(assistant("no JSON"))


def call(name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": function}]}


def test_which_calls_are_accepted() -> None:
    sample = Sample("tool_call", [user("x")], call("f", '{"a": 1, "b": "x"}'), "k")
    assert sample.accepts(call("f", '{"b":"x","a":1}'))
    for wrong in (call("g", '{"a": 1, "b": "x"}'), call("f", '{"a": 2, "b": "x"}'), call("f", "{")):
        assert not sample.accepts(wrong)
    assert not sample.accepts(assistant("I called it."))
    assert not Sample("chat", [user("x")], assistant("No."), "").accepts(call("f", "{}"))
