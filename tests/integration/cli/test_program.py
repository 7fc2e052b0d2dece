"""`mooncake` as a program of its own: what it leaves behind on pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.launch.host.environment import COMPUTE, QUIET
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S


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
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.startswith(first)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def imports_of(words: str) -> list[str]:
    """Return what `mooncake serve WORDS --dry-run` imports, in turn."""
    command = [sys.executable, "-X", "importtime", "-m", "mooncake.cli.main", "serve"]
    command += [*words.split(), "--dry-run"]
    environ = {k: v for k, v in os.environ.items() if k not in {**QUIET, **COMPUTE}}
    environ["MOONCAKE_CLUSTER_SECRET"] = "s" * 32
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    return [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        "{model} --colocated", "--role prefill --join 127.0.0.1:1",
        "--join=127.0.0.1:1 --role=decode",
    ],
)  # fmt: skip
def test_one_that_starts_again_with_other_settings_has_imported_little_before(
    words: str, tmp_path: Path
) -> None:
    """glibc reads its settings as a process starts: a process that is an engine has those of
    engines.
    """
    imported = imports_of(words.format(model=write_config_only(tmp_path / "model")))
    assert imported.count("mooncake.base") == 2, "it has started again"
    once = ("numpy", "rich", "mooncake.launch.config.config")
    assert [imported.count(name) for name in once] == [1, 1, 1]


def test_one_that_is_no_engine_does_not_start_again() -> None:
    assert imports_of("--role kvstore --join 127.0.0.1:1").count("mooncake.base") == 1
