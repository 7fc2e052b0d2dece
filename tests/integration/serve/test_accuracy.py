"""k2-demo answers what it was trained for, through HTTP, and as well in every form and layout."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import pytest

from benchmarks.accuracy import PLAIN, THRESHOLDS, TOGETHER, Form, Row, measure
from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import Sample
from tests.support.examples import tries_all

NUM_SAMPLES = {"call": 40, "code_4k": 10}
"""Twenty of every other task. Several answers may be wrong, so that none of them decides alone."""
PART = 0.6
"""The share of them that is asked of a task of which nearly all answers are right, unless all are
to be tried.
"""
NEARLY_ALL = 0.9
OF_A_FORM = 6
"""Samples of each task but `LONG`, whose prompts take seconds, that a form is compared by first."""
LONG = "code_4k"
OTHERS = ", other samples"

Samples = Mapping[str, Sequence[Sample]]


def num_samples(task: str) -> int:
    number = NUM_SAMPLES.get(task, 20)
    return number if tries_all() or THRESHOLDS[task] < NEARLY_ALL else round(PART * number)


@pytest.fixture(scope="module")
def samples() -> Samples:
    return {task: evaluation_samples(task, num_samples(task), 1) for task in THRESHOLDS}


@pytest.fixture(scope="module")
def first(samples: Samples) -> Samples:
    """What every form is asked."""
    return {task: chosen[:OF_A_FORM] for task, chosen in samples.items() if task != LONG}


@pytest.fixture(scope="module")
def others(samples: Samples, first: Samples) -> Samples:
    """What a form is asked, too, that does worse on the first ones."""
    return {task + OTHERS: samples[task][len(chosen) :] for task, chosen in first.items()}


@pytest.fixture(scope="module")
def plain(samples: Samples, first: Samples, others: Samples) -> Row:
    """The answers of bfloat16 weights in one process to all samples."""
    [row] = measure(checkpoint(DEMO), [PLAIN], {**first, **others, LONG: samples[LONG]})
    return row


def of_tasks(row: Row, tasks: Container[str]) -> Row:
    """Return the part of a row that these tasks are."""
    return dataclasses.replace(row, scores=[each for each in row.scores if each.task in tasks])


def test_the_shipped_model_is_as_good_as_stated(plain: Row) -> None:
    assert plain.failures() == []
    right, asked = Counter[str](), Counter[str]()
    for score in plain.scores:
        task = score.task.removesuffix(OTHERS)
        right[task] += score.num_right
        asked[task] += score.num_samples
    assert asked == {task: num_samples(task) for task in THRESHOLDS}
    least = {task: math.floor(THRESHOLDS[task] * num) for task, num in asked.items()}
    assert {task: each for task, each in right.items() if each < least[task]} == {}


@pytest.mark.parametrize("form", TOGETHER, ids=lambda form: form.name)
def test_no_form_answers_worse(form: Form, plain: Row, first: Samples, others: Samples) -> None:
    [row] = measure(checkpoint(DEMO), [form], first)
    assert row.failures() == []
    assert row.unlike(plain), "quantized, and likelihoods are those of bfloat16"
    beside = of_tasks(plain, first)
    if not row.keeps(beside):
        # Of forms that are as good, one in six is that low by chance. All samples together tell.
        [more] = measure(checkpoint(DEMO), [form], others)
        assert more.failures() == []
        row = dataclasses.replace(row, scores=[*row.scores, *more.scores])
        beside = of_tasks(plain, {*first, *others})
    assert row.num_samples == beside.num_samples
    assert row.keeps(beside), f"{row.accuracy:.3f}, and {beside.accuracy:.3f} in bfloat16"
