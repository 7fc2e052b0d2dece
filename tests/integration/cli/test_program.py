"""`mooncake` as a program of its own: what it leaves behind on pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.model.checkpoints import write_config_only


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("serve --help", "usage: mooncake serve"),
        ("serve {model} --dry-run --dram 64MiB", "configuration"),
        ("version", "mooncake "),
    ],
)
def test_a_reader_that_leaves_ends_the_command_quietly(
    words: str, first: str, tmp_path: Path
) -> None:
    """`mooncake serve --help | head -1` must not end in a stack trace, nor as a failure."""
    command = words.format(model=write_config_only(tmp_path / "model"))
    script = f"{sys.executable} -m mooncake.cli.main {command} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(first)
    assert done.stderr == ""
    assert done.returncode in (0, 141)
