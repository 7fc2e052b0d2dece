"""The gateway's prediction of a first token on a mixed load, simulated."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.predicted_ttft import LAYOUTS, compare, mixed_load


@pytest.mark.parametrize("with_targets", [False, True], ids=["without", "with_targets"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_of_the_first_tokens_come_within_a_tenth_of_what_was_predicted(
    layout: str, with_targets: bool
) -> None:
    load = mixed_load(0.35, 100, 1)
    found = compare(layout, load, with_targets=with_targets, scatter=0.05, seed=1)
    assert len(found) == len(load)
    assert statistics.median(each.error for each in found) < 0.1


def test_a_prediction_on_an_idle_cluster_is_exact_but_for_messages_and_the_fit() -> None:
    """Requests so far apart meet nobody, and steps do not scatter."""
    for layout in LAYOUTS:
        found = compare(layout, mixed_load(0.01, 8, 3), with_targets=True, scatter=0.0, seed=1)
        assert max(each.error for each in found) < 0.1
