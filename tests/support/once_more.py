"""A pytest plugin for the build machine: what failed beside other tests runs once more by itself.

Its cores are few and shared, so now and then a sound test meets what another left, or waits longer
than it may. A few failures are run again in a process of their own; a run whose failures all pass
there passes, and its output names them, for somebody to mend. `PYTEST_ADDOPTS="-p
tests.support.once_more"` turns it on; without it a failure is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MOST = 3
"""More failures than this are no accident: none of them runs again."""

_failed: dict[str, None] = {}
"""The node ids of what failed, in order."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed[report.nodeid] = None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Run failures again and let the session pass where they do. Anything but failed tests, such as
    a file that cannot be imported, stays as it is.
    """
    is_xdist_worker = hasattr(session.config, "workerinput")
    only_tests_failed = exitstatus == pytest.ExitCode.TESTS_FAILED and _failed
    if is_xdist_worker or not only_tests_failed or len(_failed) > MOST:
        return
    print(f"\n== once more, alone: {' '.join(_failed)}", flush=True)
    plugins = [each for each in session.config.getoption("plugins") if each != __name__]
    loaded = [f"-p{each}" for each in plugins]
    command = [sys.executable, "-m", "pytest", "-v", *loaded, *_failed]
    again = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    if subprocess.run(command, cwd=session.config.rootpath, env=again).returncode == 0:
        for test in _failed:
            print(f"FLAKY {test}: it failed beside other tests and passed alone", flush=True)
        session.exitstatus = pytest.ExitCode.OK
