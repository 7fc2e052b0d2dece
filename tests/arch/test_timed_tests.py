"""The build machine prints one table of what all its files of tests cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.sizes import ROOT
from tests.support.timed_tests import SHOWN, table


def run_there(folder: Path, *words: str) -> str:
    """Run the tests of the folder with the plugin; return what they print."""
    told = {
        "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p tests.support.timed_tests",
        "MOONCAKE_TEST_TIMES": str(folder / "times"),
    }  # fmt: skip
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words], cwd=folder, env=os.environ | told,
        capture_output=True, timeout=120, check=True, text=True,
    )  # fmt: skip
    return done.stdout


def test_each_process_leaves_what_its_files_cost(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    run_there(tmp_path, "-p", "xdist", "-n", "2", "--dist", "loadfile")
    shown = table(tmp_path / "times")
    assert re.search(r" 2  test_one\.py$", shown, re.MULTILINE)
    assert re.search(r" 2  test_two\.py$", shown, re.MULTILINE)
    assert re.search(r" 4  \(all\)$", shown, re.MULTILINE)


def test_the_dearest_come_first_and_of_all_processes_together(tmp_path: Path) -> None:
    for process in range(2):
        costs = {f"file {number}": [1, 2.0, float(number)] for number in range(SHOWN + 3)}
        (tmp_path / f"{process}.json").write_text(json.dumps(costs))
    _, first, *_, others, together = table(tmp_path).splitlines()
    assert first.split() == ["84.0", "4.0", "2", "file", str(SHOWN + 2)]
    assert others.split() == ["6.0", "12.0", "6", "(3", "others)"]
    assert together.split()[2] == str(2 * (SHOWN + 3))


def test_what_nobody_waits_for_costs_too(tmp_path: Path) -> None:
    """What fork servers fork is counted where this process may make a control group."""
    body = """
import signal, subprocess, sys
from tests.support.timed_tests import _Group
def test_a():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    words = "import time\\nwhile time.process_time() < 0.5: pass"
    assert subprocess.Popen([sys.executable, "-c", words]).wait() == 0
    print("a group:", _Group.path)
"""
    (tmp_path / "test_one.py").write_text(body)
    [group] = re.findall("a group: (.*)", run_there(tmp_path, "-s"))
    if group == "None":
        pytest.skip("this user may make no control group")
    [kept] = (tmp_path / "times").iterdir()
    [num_tests, _, cpu_s] = json.loads(kept.read_text())["test_one.py"]
    assert num_tests == 1
    assert cpu_s > 0.5
    assert not Path(group).exists()
