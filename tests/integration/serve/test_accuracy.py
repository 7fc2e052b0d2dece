"""k2-demo answers what it was trained for, through HTTP, and as well in every form and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from benchmarks.accuracy import PLAIN, THRESHOLDS, TOGETHER, Form, Row, measure
from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import Sample

NUM_SAMPLES = 10


@pytest.fixture(scope="module")
def samples() -> Mapping[str, Sequence[Sample]]:
    return {task: evaluation_samples(task, NUM_SAMPLES, 1) for task in THRESHOLDS}


@pytest.fixture(scope="module")
def plain(samples: Mapping[str, Sequence[Sample]]) -> Row:
    """The answers of bfloat16 weights in one process."""
    [row] = measure(checkpoint(DEMO), [PLAIN], samples)
    return row


def test_the_shipped_model_is_as_good_as_stated(plain: Row) -> None:
    assert plain.failures() == []
    below = {
        score.task: score.accuracy
        for score in plain.scores
        if score.accuracy < THRESHOLDS[score.task]
    }
    assert below == {}


@pytest.mark.parametrize("form", TOGETHER, ids=lambda form: form.name)
def test_no_form_answers_worse(
    form: Form, plain: Row, samples: Mapping[str, Sequence[Sample]]
) -> None:
    [row] = measure(checkpoint(DEMO), [form], samples)
    assert row.failures() == []
    assert row.keeps(plain), f"{row.accuracy:.3f}, and {plain.accuracy:.3f} in bfloat16"
    assert row.unlike(plain), "quantized, and likelihoods are those of bfloat16"
