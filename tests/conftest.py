"""What holds for all tests. Some of it is set before anything imports Triton: without a GPU its
kernels run in its interpreter.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from mooncake_kernels.native import build

from mooncake.launch.host import environment
from mooncake.launch.host.processes.start_phases import importing
from tests.support.examples import examples
from tests.support.slow_files import APART, is_in_slow_folder, may_hold, turn

# Machines are slow at times: no test of a property is about how long an example takes.
settings.register_profile("untimed", deadline=None, max_examples=examples(100))
settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:  # every worker has a core: threads of its own would wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
build.keep_in(environment.cache_dir())  # compiled once, not in each process: nine CPU seconds


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that `-m` would only import: all of them take each process 40 CPU seconds."""
    chosen = config.getoption("markexpr")
    if chosen == "not slow" and is_in_slow_folder(collection_path):
        return True
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    marker = chosen.removesuffix(" and not alone")
    if marker in APART and is_test and not may_hold(collection_path, marker):
        return True
    return None


_failures: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note that a test failed here."""
    if report.failed:
        _failures.append(report.nodeid)


def pytest_runtest_logfinish() -> None:
    """Drop what a failed test left, without the warnings that would fail the next one."""
    if not _failures:
        return
    _failures.clear()
    sys.last_type = sys.last_value = sys.last_traceback = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage among the modules that are imported, now or later: it took a quarter of
    that time, and half a second whenever tests had made much.
    """
    with importing():
        collected = yield
    gc.freeze()
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and mark the tests of slow folders, so that `make test` leaves
    them to `make test-slow`. No limit of a test's own is shorter than what the environment gives
    all: that says how busy the machine is.
    """
    items.sort(key=lambda item: turn(item.path))
    least_s = float(os.environ.get("PYTEST_TIMEOUT", "0"))
    for item in items:
        own = item.get_closest_marker("timeout")
        if own is not None and own.args[0] < least_s:
            item.add_marker(pytest.mark.timeout(least_s), append=False)
        if is_in_slow_folder(item.path):
            item.add_marker(pytest.mark.slow)
        for marker in APART:
            if item.get_closest_marker(marker) and not may_hold(item.path, marker):
                raise pytest.UsageError(
                    f"{item.path} has tests of the marker {marker} and nowhere says mark.{marker}: "
                    f"`-m {marker}` would miss them"
                )


def _logging_as_before() -> Iterator[None]:
    """What a test starts in this process may configure logging; the next one must not see that."""
    logger = logging.getLogger("mooncake")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)
    for handler in logger.handlers:
        if handler not in handlers:
            handler.close()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


logging_as_before = pytest.fixture(autouse=True)(_logging_as_before)
logging_before_the_module = pytest.fixture(autouse=True, scope="module")(_logging_as_before)
"""What fixtures of a module start may do so, too."""
