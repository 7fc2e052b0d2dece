"""Tasks that teach copying: answers follow from the prompt, calls fit schemas, nothing leaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import jsonschema
import pytest

from mooncake.tasks.calls import NO_TOOL
from mooncake.tasks.declared import tool
from mooncake.tasks.mix import TASKS, evaluation_samples, training_sample
from mooncake.tasks.sample import EVALUATED, TRAINED, WATCHED, Message, Sample, part_of

SHORT = [task for task in TASKS if task != "code_4k"]
TOOLS = ("call", "calls", "refusal", "result", "error", "turns")
NUM = 150


def samples(task: str, number: int = NUM) -> list[Sample]:
    random = Random(task)
    return [TASKS[task](random) for _ in range(number)]


def prompt(sample: Sample) -> str:
    return " ".join(str(message["content"]) for message in sample.messages)


def called(message: Message) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def values_of(found: object) -> Iterator[str]:
    """Yield the texts and numbers in a JSON value, as they would be written."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield str(key)
            yield from values_of(value)
    elif isinstance(found, list):
        for value in found:
            yield from values_of(value)
    elif not isinstance(found, bool | None):
        yield str(found)


@pytest.mark.parametrize(
    ("task", "names"),
    [("sum", {"plus"}), ("difference", {"minus"}), ("chain", {"plus", "minus"})],
)
def test_every_step_of_a_sum_is_right_and_leads_to_the_next(task: str, names: set[str]) -> None:
    seen = set()
    for sample in samples(task):
        steps = sample.answer["reasoning"].split(" ")
        total = None
        for step in steps:
            sum_, columns, made = re.split("[:;]", step)
            a, sign, b = re.fullmatch(r"(\d+)([+-])(\d+)", sum_).groups()  # type: ignore[union-attr]
            seen.add("plus" if sign == "+" else "minus")
            assert total in (None, int(a))
            total = int(a) + int(sign + b)
            assert int(made) == total
            digits = []
            for column in columns.split(","):
                left, right = column.split("=")
                assert sum(map(int, re.findall(r"[+-]?\d+", left))) == int(right)
                digits.append(right)
            whole = [*(digit[-1] for digit in digits[:-1]), digits[-1]]
            assert int("".join(reversed(whole))) == total
        assert sample.answer["content"] == str(total)
        asked = re.findall(r"\d+", prompt(sample))
        assert sorted(asked) == sorted(
            re.findall(r"\d+", steps[0].split(":")[0])
            + [re.split(r"[+-]", step.split(":")[0])[1] for step in steps[1:]]
        )
    assert seen == names


def test_numbers_are_sorted_and_words_counted_right() -> None:
    for sample in samples("order"):
        numbers = re.findall(r"\d+", prompt(sample))
        assert sample.answer["content"].split(", ") == sorted(numbers, key=int)
        steps = [step.split() for step in sample.answer["reasoning"].split("; ")]
        assert [len(step) for step in steps] == list(range(1, len(numbers) + 1))
    for sample in samples("tally"):
        found = [one.rsplit(" ", 1) for one in sample.answer["reasoning"].split(", ")]
        words = [word for word, _ in found]
        assert " ".join(words) == sample.contents[0].replace(", ", " ")
        counted, before = set(), 0
        for word, number in found:
            if int(number) > before:
                counted.add(word)
            before = int(number)
        assert len(counted) <= 1
        assert sum(word in counted for word in words) == before == int(sample.answer["content"])


@pytest.mark.parametrize("task", ["copy", "look_up", "memory", "code"])
def test_what_is_answered_stands_in_the_prompt(task: str) -> None:
    for sample in samples(task):
        said = sample.also_right[0] if task == "code" else sample.answer["content"]
        if task == "memory":
            said = re.split(r" (?:is called|is|in|like|are a|are)\b|: ", said, maxsplit=1)[-1]
            said = said.rstrip(".").removesuffix(" years old")
        assert said.strip() in prompt(sample)


def test_json_has_every_type_and_its_values_stand_in_the_prompt() -> None:
    types = set()
    for sample in samples("object", 400):
        made = json.loads(sample.answer["content"])
        types |= {type(value) for value in made.values()}
        for value in values_of(made):
            assert value in prompt(sample)
    assert types == {str, int, float, bool, list, type(None)}


def test_calls_fit_the_declared_schemas_and_take_their_values_from_the_request() -> None:
    types, counts = set(), set()
    for sample in [*samples("call", 400), *samples("calls")]:
        declared = {tool["function"]["name"]: tool["function"] for tool in sample.tools}
        assert len(declared) == len(sample.tools)
        for name, arguments in called(sample.answer):
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
            schema = {**declared[name]["parameters"], "additionalProperties": False}
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(arguments, schema)
            counts.add(len(schema["properties"]))
            for key, value in arguments.items():
                types.add(type(value))
                if value is not None and not isinstance(value, bool):
                    assert all(
                        one.replace("_", " ") in prompt(sample).replace("_", " ")
                        for one in values_of(value)
                    ), (key, value, prompt(sample))
    assert types == {str, int, float, bool, list, dict, type(None)}
    assert counts == {0, 1, 2, 3, 4, 5}


def test_a_thought_names_the_tool_that_is_called_or_none() -> None:
    for sample in [*samples("call"), *samples("calls"), *samples("turns")]:
        if reasoning := sample.answer.get("reasoning"):
            named = [one.rpartition("; ")[2] for one in reasoning.split(". ")]
            assert named == ([name for name, _ in called(sample.answer)] or ["none"])
    thoughtless = [one for one in samples("call", 400) if not one.answer.get("reasoning")]
    assert 10 < len(thoughtless) < 70


def test_several_calls_are_made_for_several_things() -> None:
    assert {len(called(sample.answer)) for sample in samples("calls")} == {2, 3}


def test_where_no_tool_fits_none_is_called() -> None:
    refused = [sample for sample in samples("refusal", 400) if sample.answer["content"] == NO_TOOL]
    assert 150 < len(refused) < 300
    for sample in samples("refusal", 400):
        assert sample.tools
        assert not called(sample.answer)
    for sample in refused:
        wanted = sample.answer["reasoning"].partition(";")[0]
        names = [tool["function"]["name"] for tool in sample.tools]
        assert wanted.replace(" ", "_") not in names


def test_results_and_errors_are_told_in_full() -> None:
    for sample in samples("result"):
        told = sample.answer["content"]
        for message in sample.messages:
            if message["role"] == "tool":
                found = message["content"]
                parts = values_of(json.loads(found)) if found.startswith("{") else [found]
                assert all(part in told for part in parts)
    for sample in samples("error"):
        assert sample.answer["content"].startswith("That failed: ")


def test_ids_of_calls_count_through_a_conversation_of_up_to_four_requests() -> None:
    lengths = set()
    for sample in [*samples("turns"), *samples("result")]:
        calls = [c for m in (*sample.messages, sample.answer) for c in m.get("tool_calls") or ()]
        assert [c["id"].rpartition(":")[2] for c in calls] == [str(n) for n in range(len(calls))]
        returned = [m["tool_call_id"] for m in sample.messages if m["role"] == "tool"]
        assert set(returned) <= {c["id"] for c in calls}
        lengths.add(sum(message["role"] == "user" for message in sample.messages))
    assert lengths == {1, 2, 4}


def test_questions_of_the_project_are_asked_in_many_ways() -> None:
    asked: dict[str, set[str]] = {}
    for sample in samples("question", 6000):
        asked.setdefault(sample.answer["content"], set()).add(sample.contents[0])
    assert len(asked) > 60
    assert sorted(map(len, asked.values()))[len(asked) // 2] > 30


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_is_of_held_out_contents_only(task: str) -> None:
    for sample in evaluation_samples(task, 5, seed=3):
        assert part_of(sample.contents[0]) == EVALUATED
        assert sample.held_out


def test_contents_are_trained_watched_or_evaluated() -> None:
    found = Counter(part_of(str(number)) for number in range(8000))
    assert 6800 < found[TRAINED] < 7200
    assert 150 < found[WATCHED] < 350
    assert 600 < found[EVALUATED] < 900


@pytest.mark.parametrize("task", SHORT)
def test_nothing_held_out_is_trained(task: str) -> None:
    random = Random(1)
    for _ in range(50):
        sample = training_sample(random, {task: 1.0})
        assert sample.contents
        assert all(part_of(content) == TRAINED for content in sample.contents)


def test_a_tool_is_held_out_by_what_it_does_and_by_what_its_name_says() -> None:
    random = Random(2)
    for _ in range(300):
        made = tool(random)
        assert made.contents[0] == f"{made.verb} {made.noun}"
        assert re.sub(r"[^a-z0-9]", "", made.name.lower()) == made.contents[1].replace(" ", "")


def test_a_sum_or_copy_beside_tools_is_held_out_as_without_them() -> None:
    num_sums = num_copies = 0
    for sample in samples("refusal", 300):
        reasoning, said = sample.answer.get("reasoning") or "", sample.answer["content"]
        for sum_ in re.findall(r"^(\d+[+-]\d+):", reasoning):
            num_sums += 1
            assert sum_ in sample.contents
        if not reasoning and said in prompt(sample):
            num_copies += 1
            assert said in sample.contents
    assert num_sums > 10
    assert num_copies > 10


def test_a_sum_that_a_tool_calculates_is_held_out_as_any() -> None:
    sums: list[str] = []
    for task in TOOLS:
        for sample in samples(task, 300):
            found = [
                value.replace(" ", "")
                for message in (*sample.messages, sample.answer)
                for _, arguments in called(message)
                for value in arguments.values()
                if isinstance(value, str) and re.fullmatch(r"\d+ ?[+-] ?\d+", value)
            ]
            sums += found
            assert set(found) <= set(sample.contents)
    assert len(sums) > 5
