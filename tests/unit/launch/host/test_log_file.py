"""A start on a terminal shows warnings, and writes everything to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.launch.config.config import resolve
from mooncake.launch.host.log_file import KEPT, new_log_file, start_log
from tests.support.model.checkpoints import write_config_only


@pytest.mark.parametrize(
    ("written", "is_terminal", "level", "has_file"),
    [
        ({}, True, "warning", True),
        ({}, False, "info", False),
        ({"log_level": "info"}, True, "info", False),
        ({"log_format": "json"}, True, "info", False),
        ({"access_log": True}, True, "info", False),
        ({"log_file": "here"}, True, "info", True),
        ({"role": "kvstore", "cluster_secret": "s" * 32}, True, "info", False),
    ],
)
def test_only_a_terminal_without_wishes_stays_calm(
    written: dict[str, object],
    is_terminal: bool,
    level: str,
    has_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    model = write_config_only(tmp_path / "model")
    config = resolve({"model": str(model), **written}, None, {})
    assert config.log_level == level
    assert bool(config.log_file) == has_file


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mooncake" / "logs"
    folder.mkdir(parents=True)
    for number in range(KEPT + 3):
        path = folder / f"serve-{number}0.log"
        path.write_text("of an earlier start")
        os.utime(path, (number, number))
    own = new_log_file()
    assert own is not None
    assert Path(own).read_bytes() == b""
    left = [path.name for path in folder.iterdir()]
    assert sorted(left) == sorted(
        [Path(own).name, *(f"serve-{number}0.log" for number in range(3, KEPT + 3))]
    )


def test_no_place_for_a_file_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert new_log_file() is None
    with pytest.raises(ConfigError, match=r"log-file: cannot write .*: Not a directory"):
        start_log("gateway", "info", "text", str(tmp_path / "mooncake" / "log"))
