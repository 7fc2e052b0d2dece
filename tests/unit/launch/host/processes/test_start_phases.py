"""The phases of a start: each ends where the next begins, and their line is read again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mooncake.launch.host.processes.start_phases import (
    Phase,
    StartPhases,
    phases_said,
    process_began_s,
)


def ticks(values: Iterable[float]) -> Callable[[], float]:
    return iter(values).__next__


def test_a_phase_lasts_until_the_next_and_equal_names_are_one() -> None:
    phases = StartPhases(
        "imports", 1.0, clock=ticks([3.0, 4.5, 5.0, 6.0]), cpu_clock=ticks([1.5, 1.75, 2.0, 2.0])
    )
    phases.begin("loading weights")
    phases.begin("loading weights")  # it goes on
    phases.begin("ray: starting")
    phases.begin("loading weights")
    phases.begin("ready")
    expected = [
        Phase("imports", 2.0, 1.5), Phase("loading weights", 2.5, 0.25),
        Phase("ray: starting", 0.5, 0.25),
    ]  # fmt: skip
    assert phases.ended() == expected
    text = phases.text()
    assert text == (
        "started in 5.00 s: imports 2.00 s (1.50 CPU), loading weights 2.50 s (0.25 CPU), "
        "ray: starting 0.50 s (0.25 CPU)"
    )
    assert phases_said(f"INFO gateway mooncake.launch: {text}") == expected
    assert phases_said("INFO gateway mooncake.launch: worker decode-0 is up") == []


def test_a_process_began_before_it_ran_any_test() -> None:
    assert time.monotonic() - 3600 * 24 < process_began_s() < time.monotonic()
