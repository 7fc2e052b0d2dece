"""By how much the clock of a worker differs, from reports that took longer or less long."""

from __future__ import annotations

from mooncake.telemetry.traces import MAX_REPORTS, WorkerClocks


def test_the_report_that_took_least_says_it() -> None:
    clocks = WorkerClocks()
    for number, took_s in enumerate([0.5, 0.01, 0.2]):
        clocks.reported("p0", 100.0 + number, 5.0 + number + took_s)
    ahead_s = clocks.ahead_s("p0")
    assert ahead_s is not None
    assert abs(ahead_s - -94.99) < 1e-9


def test_old_reports_count_no_more() -> None:
    clocks = WorkerClocks()
    clocks.reported("p0", 0.0, 1.0)
    for number in range(MAX_REPORTS):
        clocks.reported("p0", float(number), number + 2.0)
    assert clocks.ahead_s("p0") == 2.0


def test_a_worker_that_is_not_known_or_has_left_has_none() -> None:
    clocks = WorkerClocks()
    assert clocks.ahead_s("p0") is None
    clocks.reported("p0", 0.0, 1.0)
    clocks.forget("p0")
    clocks.forget("p1")
    assert clocks.ahead_s("p0") is None
