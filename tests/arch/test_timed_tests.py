"""The build machine prints one table of what all its files of tests cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.arch.sizes import ROOT
from tests.support.timed_tests import SHOWN, table


def test_each_process_leaves_what_its_files_cost(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    told = {
        "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p tests.support.timed_tests",
        "MOONCAKE_TEST_TIMES": str(tmp_path / "times"),
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--dist", "loadfile"],
        cwd=tmp_path, env=os.environ | told, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
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
