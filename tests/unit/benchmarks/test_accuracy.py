"""A form of the model is lower if its answers are, by more than chance lets them be."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import PLAIN, Row
from mooncake.bench.evaluate import Score


def row(num_right: int, num_samples: int) -> Row:
    half = num_samples // 2
    scores = [Score("sum", half, num_right - half), Score("copy", num_samples - half, half)]
    return Row(PLAIN, scores, [])


@pytest.mark.parametrize(
    ("num_right", "of_first", "num_samples", "keeps"),
    [
        (98, 98, 100, True), (99, 98, 100, True), (96, 98, 100, True), (95, 98, 100, False),
        (187, 191, 200, True), (185, 191, 200, False), (208, 210, 220, True),
        (203, 210, 220, False),
    ],
)  # fmt: skip
def test_one_standard_error_is_chance(
    num_right: int, of_first: int, num_samples: int, keeps: bool
) -> None:
    assert row(num_right, num_samples).accuracy == num_right / num_samples
    assert row(num_right, num_samples).keeps(row(of_first, num_samples)) == keeps
