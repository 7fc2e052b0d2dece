"""The files of `configs/lm-eval`: one of each task, and its answers are judged as ours are."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
import yaml

from benchmarks.lm_eval import DATA, ROOT, TASK_FILES, documents
from mooncake.api.text.chat_template import ChatTemplate
from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import Sample

PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
Judge = Callable[[Mapping[str, Any], Sequence[str]], dict[str, float]]


@pytest.fixture(scope="module")
def judge() -> Judge:
    """The function that the harness loads."""
    spec = importlib.util.spec_from_file_location("answers", TASK_FILES / "answers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Judge = module.process_results
    return function


def generated(sample: Sample) -> str:
    """The text that a model writes whose answer is the wanted one."""
    answer = sample.answer
    text = f"<think>{answer['reasoning']}</think>" if answer.get("reasoning") else ""
    text += answer["content"]
    for call in answer.get("tool_calls") or ():
        function = call["function"]
        text += (
            f"<|tool_calls_section_begin|><|tool_call_begin|>{call['id']}"
            f"<|tool_call_argument_begin|>{function['arguments']}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        )
    return text


def test_each_task_has_a_file_that_reads_what_is_written() -> None:
    for task in TASKS:
        read = yaml.safe_load((TASK_FILES / f"{task}.yaml").read_text())
        assert read["task"] == f"mooncake_{task}"
        assert ROOT / read["dataset_kwargs"]["data_files"]["test"] == DATA / f"{task}.jsonl"
        assert (TASK_FILES / read["include"]).is_file()


@pytest.mark.parametrize("task", [task for task in TASKS if task != "code_4k"])
def test_the_wanted_answer_is_right_and_anothers_is_not(task: str, judge: Judge) -> None:
    samples = evaluation_samples(task, 12, 1)
    found = json.loads(json.dumps(documents(samples, PLAIN, Random(0))))
    for sample, document in zip(samples, found, strict=True):
        assert judge(document, [generated(sample)]) == {"right": 1.0}
        assert document["choices"][document["gold"]] == sample.answer["content"]
        for other in samples:
            accepted = sample.accepts(other.answer)
            assert judge(document, [generated(other)]) == {"right": float(accepted)}


def test_the_order_of_arguments_does_not_matter(judge: Judge) -> None:
    document = {"calls": True, "is_json": False, "right": ['[["book", {"a": 1, "b": 2}]]']}
    call = "<|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert judge(document, [call.replace("{}", '{"b": 2, "a": 1}')]) == {"right": 1.0}
    assert judge(document, [call.replace("{}", '{"b": 2, "a": 2}')]) == {"right": 0.0}
    assert judge(document, ["I have booked it."]) == {"right": 0.0}


def test_prompts_hold_no_thoughts_and_no_answer() -> None:
    asked = [{"role": "user", "content": "2+2"}]
    sample = Sample("x", asked, {"content": "4", "reasoning": "hm"})
    [document] = documents([sample], PLAIN, Random(0))
    assert document["prompt"] == "user: 2+2\n"
