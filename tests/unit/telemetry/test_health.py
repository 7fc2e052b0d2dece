"""Which probe passes in which state, and what a person is told."""

from __future__ import annotations

import pytest

from mooncake.telemetry.health import Probe, Status, Verdict, Vitals, judge, passes

STATES = {
    Status.OK: Vitals(),
    Status.STARTING: Vitals(starting="loading weights", num_done=3, num_whole=10, joined=False),
    Status.JOINING: Vitals(joined=False),
    Status.DRAINING: Vitals(draining=True),
    Status.STUCK: Vitals(stuck_s=120.5, limit_s=120),
    Status.FAILED: Vitals(failure="step 3 made no progress for 120 s"),
}
REASONS = {
    Status.OK: "",
    Status.STARTING: "loading weights, 3 of 10",
    Status.JOINING: "no gateway knows it yet",
    Status.DRAINING: "it was told to leave",
    Status.STUCK: "its loop has not turned for 120 s",
    Status.FAILED: "step 3 made no progress for 120 s",
}


@pytest.mark.parametrize(
    ("status", "startup", "ready", "live"),
    [
        (Status.STARTING, False, False, True),
        (Status.JOINING, True, False, True),
        (Status.OK, True, True, True),
        (Status.DRAINING, True, False, True),
        (Status.STUCK, False, False, False),
        (Status.FAILED, False, False, False),
    ],
)
def test_each_state_passes_its_probes(
    status: Status, startup: bool, ready: bool, live: bool
) -> None:
    vitals = STATES[status]
    assert vitals.status is status
    assert vitals.reason == REASONS[status]
    found = [passes(probe, vitals) for probe in (Probe.STARTUP, Probe.READY, Probe.LIVE)]
    assert found == [startup, ready, live]


def test_all_states_are_named_above() -> None:
    assert set(STATES) == set(REASONS) == set(Status)


def test_the_worst_that_is_true_counts() -> None:
    bad = Vitals(failure="f", stuck_s=9, limit_s=1, starting="s", draining=True, joined=False)
    assert bad.status is Status.FAILED
    for left_out, then in (
        ({"failure": ""}, Status.STUCK),
        ({"stuck_s": 0.0}, Status.STARTING),
        ({"starting": ""}, Status.DRAINING),
        ({"draining": False}, Status.JOINING),
    ):
        for name, value in left_out.items():
            fields = {field: getattr(bad, field) for field in bad.__struct_fields__}
            bad = Vitals(**{**fields, name: value})
        assert bad.status is then


def test_a_loop_at_its_limit_is_not_stuck_yet() -> None:
    assert Vitals(stuck_s=1.0, limit_s=1.0).status is Status.OK


def test_a_process_is_as_well_as_its_worst_part() -> None:
    well, starting, failed = (STATES[s] for s in (Status.OK, Status.STARTING, Status.FAILED))
    assert judge(Probe.LIVE, []) == (True, Verdict("ok"))
    assert judge(Probe.LIVE, [well, failed, starting]) == (
        False, Verdict("failed", "step 3 made no progress for 120 s"),
    )  # fmt: skip
    assert judge(Probe.LIVE, [well, starting]) == (
        True, Verdict("starting", "loading weights, 3 of 10"),
    )  # fmt: skip
    assert judge(Probe.STARTUP, [well, starting])[0] is False
