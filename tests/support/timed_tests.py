"""A pytest plugin that prints every test with its seconds, and keeps what each file cost.

`-v -p tests.support.timed_tests` prints them. Where MOONCAKE_TEST_TIMES names a folder, each
process of tests leaves there what its files took, and `python -m tests.support.timed_tests FOLDER`
prints one table of them all, the dearest first. The CPU seconds are those of a control group that
the process makes for itself, if it may: what its fork servers fork, nobody waits for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

SHOWN = 40
"""Files that the table names; all others share its last row."""
READING = "(importing the files)"
GROUPS = Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")
"""Where version 2 of control groups may be mounted."""

_setup_s: dict[str, float] = {}
_costs: defaultdict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
"""The number of tests, the seconds and the CPU seconds of each file in this process."""


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Add the seconds of set-up and call to the word that `-v` prints."""
    if report.when == "setup":
        _setup_s[report.nodeid] = report.duration
    if report.when != "call":
        return None
    seconds = report.duration + _setup_s.pop(report.nodeid, 0.0)
    letter = "." if report.passed else report.outcome[0].upper()
    return report.outcome, letter, f"{report.outcome.upper()} in {seconds:.1f} s"


class _Group:
    """The control group of this process and all that it starts; None: it has none of its own."""

    path: Path | None = None


def pytest_configure() -> None:
    """Move this process to a control group of its own, which counts what all below it takes."""
    if "MOONCAKE_TEST_TIMES" not in os.environ or _Group.path is not None:
        return
    with contextlib.suppress(OSError, StopIteration):  # none here, or not for this user
        root = next(each for each in GROUPS if (each / "cgroup.procs").exists())
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        ours = next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        group = root / ours / f"tests-{os.getpid()}"
        if (group.parent / "cgroup.subtree_control").read_text().split():
            return  # a group in it would get a share of the cores of its own
        group.mkdir()
        atexit.register(_leave, group)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        _Group.path = group


def _leave(group: Path) -> None:
    """Return to the group above, and remove this one unless something that was left runs there."""
    with contextlib.suppress(OSError):
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _now() -> tuple[float, float]:
    """Return the time, and the CPU seconds of this process and all that it has started; without a
    control group, of the children that it has waited for.
    """
    if _Group.path is not None:
        usage = (_Group.path / "cpu.stat").read_text(encoding="ascii").split()
        return time.monotonic(), int(usage[usage.index("usage_usec") + 1]) / 1e6
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(each.ru_utime + each.ru_stime for each in used)


def _add(file: str, num_tests: int, began: tuple[float, float]) -> None:
    tests, seconds, cpu_s = _costs[file]
    now = _now()
    _costs[file] = tests + num_tests, seconds + now[0] - began[0], cpu_s + now[1] - began[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    began = _now()
    try:
        return (yield)
    finally:
        _add(READING, 0, began)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = _now()
    try:
        return (yield)
    finally:
        _add(item.nodeid.partition("::")[0], 1, began)


def pytest_sessionfinish() -> None:
    """Leave what the files cost where the table is made."""
    if folder := os.environ.get("MOONCAKE_TEST_TIMES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(_costs), encoding="utf-8")


def table(folder: Path) -> str:
    """Return what the files of all runs cost, the dearest first."""
    costs: dict[str, list[float]] = {}
    for kept in folder.glob("*.json"):
        for file, cost in json.loads(kept.read_text(encoding="utf-8")).items():
            costs[file] = _sum([cost, costs.get(file, [])])
    rows = sorted(costs.items(), key=lambda row: -row[1][2])
    others = [cost for _, cost in rows[SHOWN:]]
    rows = [
        *rows[:SHOWN], (f"({len(others)} others)", _sum(others)), ("(all)", _sum(costs.values()))
    ]  # fmt: skip
    lines = [f"{'CPU s':>9} {'seconds':>9} {'tests':>6}  file"]
    lines += [f"{cpu:9.1f} {took:9.1f} {tests:6.0f}  {name}" for name, (tests, took, cpu) in rows]
    return "\n".join(lines)


def _sum(costs: Iterable[Sequence[float]]) -> list[float]:
    return [sum(each) for each in zip((0, 0.0, 0.0), *filter(None, costs), strict=True)]


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
