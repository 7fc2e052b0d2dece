"""No test is forgotten: the build machine runs every folder of tests/, the slow tests too."""

from __future__ import annotations

import re
import shlex
import subprocess

from tests.arch.sizes import ROOT


def build_commands() -> list[str]:
    """Return the commands that `.ci/run` comes down to, as make would run them."""
    script = (ROOT / ".ci" / "run").read_text()
    calls = re.findall(r"^make ([^|&>\n]+)", script, re.MULTILINE)
    done = [
        subprocess.run(
            ["make", "--dry-run", "--no-print-directory", *shlex.split(call)],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for call in calls
    ]  # fmt: skip
    return "".join(done).replace("\\\n", "").splitlines()


def test_the_build_machine_runs_every_folder_of_tests() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    named = {
        folder for line in build_commands() for folder in re.findall(r"\btests/(\w+)\b", line)
    } - {"support"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*")}
    folders |= {path.parent.name for path in ROOT.glob("tests/*/test_*")}
    assert folders - named == set()


def test_what_is_not_quick_is_slow_and_both_run() -> None:
    """The runs without slow tests and the one of slow tests alone name the same folders."""
    quick, slow = set[str](), set[str]()
    for line in build_commands():
        folders = set(re.findall(r"\btests/\w+\b", line)) - {"tests/support"}
        if "not slow" in line:
            quick |= folders
        elif '-m "slow and not alone"' in line:
            slow |= folders
    assert quick == slow != set()
    assert any("-m alone tests/integration" in line for line in build_commands())
