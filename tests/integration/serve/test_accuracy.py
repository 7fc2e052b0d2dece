"""k2-demo answers what it was trained for, through HTTP, and as well in every form and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.accuracy import PLAIN, THRESHOLDS, TOGETHER, Form, Row, measure
from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import Sample

NUM_SAMPLES = {"tool_call": 40, "needle_4k": 10}
"""Twenty of every other task. Several answers may be wrong, so that none of them decides alone."""
OF_A_FORM = 10
"""Samples that a form is compared by; none of `LONG`, whose prompts take seconds."""
LONG = "needle_4k"


@pytest.fixture(scope="module")
def samples() -> Mapping[str, Sequence[Sample]]:
    return {task: evaluation_samples(task, NUM_SAMPLES.get(task, 20), 1) for task in THRESHOLDS}


@pytest.fixture(scope="module")
def short(samples: Mapping[str, Sequence[Sample]]) -> Mapping[str, Sequence[Sample]]:
    return {task: chosen[:OF_A_FORM] for task, chosen in samples.items() if task != LONG}


@pytest.fixture(scope="module")
def plain(short: Mapping[str, Sequence[Sample]]) -> Row:
    """The answers of bfloat16 weights in one process."""
    [row] = measure(checkpoint(DEMO), [PLAIN], short)
    return row


def test_the_shipped_model_is_as_good_as_stated(samples: Mapping[str, Sequence[Sample]]) -> None:
    [row] = measure(checkpoint(DEMO), [PLAIN], samples)
    assert row.failures() == []
    below = {
        score.task: score.accuracy
        for score in row.scores
        if score.accuracy < THRESHOLDS[score.task]
    }
    assert below == {}


@pytest.mark.parametrize("form", TOGETHER, ids=lambda form: form.name)
def test_no_form_answers_worse(
    form: Form, plain: Row, short: Mapping[str, Sequence[Sample]]
) -> None:
    [row] = measure(checkpoint(DEMO), [form], short)
    assert row.failures() == []
    assert row.keeps(plain), f"{row.accuracy:.3f}, and {plain.accuracy:.3f} in bfloat16"
    assert row.unlike(plain), "quantized, and likelihoods are those of bfloat16"
