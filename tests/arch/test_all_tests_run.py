"""The build machine runs every folder of tests/, and also the slow tests."""

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


def test_the_build_machine_leaves_out_only_what_it_runs_alone() -> None:
    """No run leaves out slow tests, and those that run alone have a run of their own."""
    runs = [shlex.split(line) for line in build_commands() if "/pytest " in line]
    markers = {words[words.index("-m") + 1] for words in runs if "-m" in words}
    assert markers == {"not alone", "alone"}
    marked = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in ROOT.glob("tests/**/*.py")
        if re.search(r"^[^#\n]*mark\.alone\b", path.read_text(), re.MULTILINE)
    }
    assert marked == {"integration"}, "the run of those alone looks there"
