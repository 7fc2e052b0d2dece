"""A start on a terminal shows warnings, and writes everything to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import ConfigError
from mooncake.launch.cluster.log_file import KEPT, new_log_file, start_log, stays_calm
from mooncake.launch.config.settings import ServeConfig

DEAD = 1 << 30
"""No process has such a number."""


@pytest.mark.parametrize(
    ("settings", "is_terminal", "is_calm"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"log_level": "info"}, True, False),
        ({"log_format": "json"}, True, False),
        ({"access_log": True}, True, False),
        ({"log_file": "here"}, True, False),
    ],
)
def test_only_a_terminal_without_wishes_stays_calm(
    settings: dict[str, Any],
    is_terminal: bool,
    is_calm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert stays_calm(ServeConfig(**settings)) == is_calm


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mooncake" / "logs"
    folder.mkdir(parents=True)
    for number in range(KEPT + 3):
        path = folder / f"serve-{DEAD + number}.log"
        path.write_text("of an earlier start")
        os.utime(path, (number, number))
    (folder / "serve-1.log").write_text("of a process that runs")
    os.utime(folder / "serve-1.log", (0, 0))
    own = new_log_file()
    assert own is not None
    assert Path(own).stat().st_mode & 0o777 == 0o600
    assert Path(own).read_bytes() == b""
    left = [path.name for path in folder.iterdir()]
    assert sorted(left) == sorted(
        [Path(own).name, "serve-1.log", *(f"serve-{DEAD + n}.log" for n in range(3, KEPT + 3))]
    )


def test_no_place_for_a_file_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert new_log_file() is None
    with pytest.raises(ConfigError, match=r"log-file: cannot write .*: Not a directory"):
        start_log("gateway", "info", "text", str(tmp_path / "mooncake" / "log"))
