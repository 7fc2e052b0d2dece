"""Axes of plots: round ticks that cover the values, whatever their size."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.sim.results.plots import Line, axis_ticks, lines_plot, round_values


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0566, 3.6, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]),
        (0.0, 3600.0, [0, 1000, 2000, 3000]),
        (0.0, 0.7, [0.0, 0.2, 0.4, 0.6]),
        (5.0, 5.0, []),
    ],
)
def test_values_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_values(low, high, 7) == ticks


@given(st.floats(1e-6, 1e12))
def test_an_axis_covers_its_values_with_few_even_ticks(highest: float) -> None:
    ticks = axis_ticks(highest)
    assert ticks[0] == 0.0
    assert ticks[-1] >= highest * 0.998
    assert 3 <= len(ticks) <= 8
    steps = [right - left for left, right in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps))
    assert re.match(r"[125]0*$", f"{steps[0]:.0e}".split("e")[0])


def test_nothing_but_zero_still_has_an_axis() -> None:
    assert axis_ticks(0.0) == [0.0, 1.0]


def test_a_plot_labels_its_time_axis_with_round_values() -> None:
    svg = lines_plot([0.0566, 1.7, 3.58], [Line(name="queue", values=[0, 3, 7])], "s", "requests")
    labels = re.findall(r'text-anchor="middle">([0-9.]+)</text>', svg)
    assert labels == ["0.5", "1", "1.5", "2", "2.5", "3", "3.5"]
