"""A pytest plugin that prints every test with its seconds: `-v -p tests.support.timed_tests`."""

from __future__ import annotations

import pytest

_setup_s: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Add the seconds of set-up and call to the word that `-v` prints."""
    if report.when == "setup":
        _setup_s[report.nodeid] = report.duration
    if report.when != "call":
        return None
    seconds = report.duration + _setup_s.pop(report.nodeid, 0.0)
    return report.outcome, report.outcome[0].upper(), f"{report.outcome.upper()} in {seconds:.1f} s"
