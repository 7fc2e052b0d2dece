"""The file of the cluster secret, followed while it changes."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.launch.host.secrets import secret_file
from mooncake.launch.host.secrets.secret_file import SecretFollower
from tests.support.waiting import LONG_S

LOOK_S = 0.01


def test_what_the_file_says_next_is_used_once_and_nothing_is_not(tmp_path: Path) -> None:
    file, used = tmp_path / "secret", queue.SimpleQueue[str]()
    file.write_text("old\n")
    follower = SecretFollower(file, used.put, LOOK_S)
    file.write_text("")
    file.unlink()
    file.write_text("new\nold\n")
    assert used.get(timeout=LONG_S) == "new\nold"
    file.write_text("new\n")
    assert used.get(timeout=LONG_S) == "new"
    follower.close()
    follower.close()
    assert used.empty()


def test_a_file_that_is_being_written_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(["old", "n", "ne", None, "ne", "new", "new", "new"])
    monkeypatch.setattr(secret_file, "_read", lambda _: next(looks, "end"))
    used = queue.SimpleQueue[str]()
    follower = SecretFollower(tmp_path / "secret", used.put, LOOK_S)
    assert used.get(timeout=LONG_S) == "new"
    assert used.get(timeout=LONG_S) == "end"
    follower.close()


def test_a_secret_that_cannot_be_used_is_logged_and_the_next_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, used = tmp_path / "secret", queue.SimpleQueue[str]()
    file.write_text("old")
    file.chmod(0o600)

    def use(given: str) -> None:
        if given == "wrong":
            raise ConfigError("it is wrong")
        used.put(given)

    follower = SecretFollower(file, use, LOOK_S)
    file.write_text("wrong")
    while not caplog.records:
        assert used.empty()
    assert "the cluster secret stays as it was: it is wrong" in caplog.text
    file.write_text("right")
    assert used.get(timeout=LONG_S) == "right"
    follower.close()


def test_without_a_file_nothing_is_followed() -> None:
    SecretFollower(None, lambda _: None).close()
