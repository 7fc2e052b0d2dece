"""The build machine forgives a test that fails once beside others, and no other failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.sizes import ROOT
from tests.support.once_more import MOST

FAILS_ONCE = """
from pathlib import Path

def test_first_meeting():
    seen = Path(__file__).with_suffix(".seen")
    known = seen.exists()
    seen.touch()
    assert known

def test_sound():
    pass
"""


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests as `.ci/run` does."""
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(tests)
    turned_on = {
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "-p tests.support.once_more",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take seconds
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options], cwd=folder, env=os.environ | turned_on,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")])
def test_what_fails_once_is_named_and_forgiven(tmp_path: Path, options: tuple[str, ...]) -> None:
    ended = run(tmp_path, FAILS_ONCE, *options)
    assert ended.returncode == 0, ended.stdout
    assert "FLAKY test_it.py::test_first_meeting" in ended.stdout


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "def test_wrong():\n    assert False\n")
    assert ended.returncode == 1
    assert "once more" in ended.stdout
    assert "FLAKY" not in ended.stdout


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    wrong = [f"def test_{number}():\n    assert False\n" for number in range(MOST + 1)]
    ended = run(tmp_path, "".join(wrong))
    assert ended.returncode == 1
    assert "once more" not in ended.stdout


def test_a_file_that_cannot_be_read_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "import nothing_of_that_name\n")
    assert ended.returncode not in (0, 1)
