"""Fifty seeds of faults over the shipped machines, checked after every event; in almost half
of the clusters instances have several ranks. See `mooncake.sim.faults.random_faults`. `make soak
SEEDS=… FIRST=…` runs as many as you like.
"""

from __future__ import annotations

import os

import pytest

from mooncake.sim.faults.plan import KINDS
from mooncake.sim.faults.random_faults import Trial, TrialReport, describe_failure
from tests.support.examples import examples

FIRST = int(os.environ.get("SOAK_FIRST", "0"))
NUM_SEEDS = int(os.environ.get("SOAK_SEEDS") or examples(50))
SEEDS_A_TEST = 10
HEARTBEAT_S = 2.0
"""A worker that says nothing for so long is given up in these clusters."""


def play(seed: int) -> TrialReport:
    report = Trial(seed).run()
    assert report.failure is None, describe_failure(report)
    return report


@pytest.mark.parametrize("first", range(FIRST, FIRST + NUM_SEEDS, SEEDS_A_TEST))
def test_every_check_holds_whatever_happens(first: int) -> None:
    reports = [play(seed) for seed in range(first, min(first + SEEDS_A_TEST, FIRST + NUM_SEEDS))]
    assert sum(report.endings.get("length", 0) for report in reports) > 0


def test_a_seed_is_the_same_run_again() -> None:
    assert Trial(17).run() == Trial(17).run()


def test_all_kinds_of_faults_are_tried_and_stopped_workers_write_late() -> None:
    """Also a worker that goes on after it was given up, and writes by grants that are revoked."""
    kinds: set[str] = set()
    num_late = num_stopped_for_long = 0
    for seed in range(40):
        trial = Trial(seed)
        trial.run()
        kinds |= {fault.kind for fault in trial.faults}
        num_late += trial.world.network.num_writes_refused
        num_stopped_for_long += sum(
            fault.kind == "hang" and fault.seconds > HEARTBEAT_S for fault in trial.faults
        )
        if kinds == set(KINDS) and num_late and num_stopped_for_long:
            return
    pytest.fail(f"never tried: {set(KINDS) - kinds}; {num_late} late writes")


def test_a_failure_names_its_seed_its_command_and_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Trial(3)
    machine = trial.world.machines()[1][1]
    monkeypatch.setattr(machine, "check_integrity", _broken)
    report = trial.run()
    assert report.failure == "a page was lost"
    text = describe_failure(report)
    assert "mooncake simulate --faults random --seed 3" in text
    assert report.last_events
    assert text.endswith(report.last_events[-1])


def _broken() -> None:
    raise AssertionError("a page was lost")
