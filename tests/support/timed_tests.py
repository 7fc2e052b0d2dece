"""A pytest plugin that prints every test with its seconds, and has long files begin first:
`-v -p tests.support.timed_tests`.
"""

from __future__ import annotations

import pytest

_setup_s: dict[str, float] = {}
_LONG = ("test_compiles_for_hopper.py", "test_rank_processes.py")
"""Files that one process takes many minutes for: begun late, the others would wait for them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, and leave all else in order."""
    items.sort(key=lambda item: item.path.name not in _LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Add the seconds of set-up and call to the word that `-v` prints."""
    if report.when == "setup":
        _setup_s[report.nodeid] = report.duration
    if report.when != "call":
        return None
    seconds = report.duration + _setup_s.pop(report.nodeid, 0.0)
    return report.outcome, report.outcome[0].upper(), f"{report.outcome.upper()} in {seconds:.1f} s"
