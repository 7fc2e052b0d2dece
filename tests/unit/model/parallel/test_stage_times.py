"""Which of an instance's stages the others wait for, by how long each computes its steps."""

from __future__ import annotations

import logging

import pytest

from mooncake.model.parallel.stages import SLOW, WAITED_FOR, StageTimes


def test_a_stage_that_computes_much_longer_than_the_others_is_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By what it took in a window of steps; the log says it once a minute."""
    times = StageTimes([2, 2, 2])
    for step in range(10):
        times.add([0.25, 1.0, 0.25], float(step))
    assert times.counters[f"{SLOW}1"] == 7.5
    assert "stage 1 of 3 of this worker is slow: others waited 7.5 s for it" in caplog.text
    caplog.clear()
    for step in range(10):
        times.add([0.25, 1.0, 0.25], 20.0 + step)
    assert times.counters[f"{SLOW}1"] == 15.0
    assert not caplog.text
    for step in range(10):
        times.add([0.25, 1.0, 0.25], 60.0 + step)
    assert "stage 1 of 3" in caplog.text
    assert {f"{WAITED_FOR}{stage}": times.counters[f"{WAITED_FOR}{stage}"] for stage in (0, 2)} == {
        f"{WAITED_FOR}0": 0.0, f"{WAITED_FOR}2": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        [[0.6, 1.0]] * 100,
        [[1.0, 0.25]] * 5 + [[0.25, 1.0]] * 5,
        [[1.0, 1.0, 0.25]] * 100,
        [[0.25, 1.0]] * 9,
    ],
    ids=["a little longer", "in turns", "two of them", "not for long"],
)
def test_no_stage_is_slow(steps: list[list[float]], caplog: pytest.LogCaptureFixture) -> None:
    """Each second of one stage that no other computes is counted as waited for."""
    caplog.set_level(logging.WARNING)
    times = StageTimes([1] * len(steps[0]))
    for number, seconds in enumerate(steps):
        times.add(seconds, float(number))
    assert not [name for name in times.counters if name.startswith(SLOW)]
    assert not caplog.text
    waited = [times.counters[f"{WAITED_FOR}{stage}"] for stage in range(len(steps[0]))]
    ahead = [sorted(seconds)[-1] - sorted(seconds)[-2] for seconds in steps]
    assert sum(waited) == pytest.approx(sum(ahead))


def test_a_stage_of_more_layers_may_take_longer() -> None:
    times = StageTimes([4, 1])
    for number in range(18):
        times.add([4.0, 1.0], float(number))
    assert times.counters == {f"{WAITED_FOR}0": 0.0, f"{WAITED_FOR}1": 0.0}
    times.add([20.0, 2.0], 30.0)
    assert times.counters[f"{SLOW}0"] == times.counters[f"{WAITED_FOR}0"] == 12.0
