"""Percentiles as everyone computes them, and TBT as the paper defines it."""

from random import Random

import numpy as np
import pytest

from mooncake.telemetry.stats import percentile, slow_gap_mean


@pytest.mark.parametrize("percent", [0, 1, 25, 50, 90, 99, 99.9, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_agree_with_numpy(percent: float, count: int) -> None:
    random = Random(count)
    values = [random.gauss(0, 1) for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], 101)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], 0.0),
        ([0.5], 0.5),
        ([0.1] * 9 + [1.0], 1.0),
        ([0.1] * 19 + [1.0], 0.55),
        ([1.0, *[0.1] * 18, 3.0], 2.0),
        ([0.1] * 10 + [1.0], 0.55),
    ],
)
def test_tbt_is_the_mean_of_the_slowest_tenth(gaps: list[float], expected: float) -> None:
    assert slow_gap_mean(gaps) == pytest.approx(expected)
