"""The audit log: one JSON object a line, in a private file that may be moved away, and few of those
that strangers cause.
"""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import ConfigError
from mooncake.telemetry import audit as module
from mooncake.telemetry.audit import (
    FEWER,
    MAX_CHARS,
    MOST_A_MINUTE,
    OPERATOR_ROUTE,
    audit,
    configure_audit,
)
from mooncake.telemetry.log import MAX_KINDS, Throttle

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "audit.jsonl"
    configure_audit("gw-1", str(place))
    yield place
    configure_audit("", None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_where_what_and_who(path: Path) -> None:
    audit("drain", who="ops\n", whence="10.0.0.7", num_blocks=None, names=["a", "b"])
    (line,) = lines(path)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "process": "gw-1", "event": "drain", "who": "ops\n", "whence": "10.0.0.7",
        "names": ["a", "b"],
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_place_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    configure_audit("gw-1", None)
    audit("drain", who="ops")
    configure_audit("gw-1", "-")
    audit("drain", who="ops")
    configure_audit("", None)
    out, err = capfd.readouterr()
    assert out == ""
    assert [json.loads(line)["who"] for line in err.splitlines()] == ["ops"]


def test_lines_go_to_a_new_file_once_the_old_one_is_moved_away(path: Path) -> None:
    audit("drain", who="first")
    moved = path.rename(path.with_suffix(".1"))
    module._reopen()
    assert path.exists(), "as a signal asks"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    audit("drain", who="second")
    path.unlink()
    audit("drain", who="third")
    assert [each["who"] for each in (*lines(moved), *lines(path))] == ["first", "third"]


def test_what_was_there_stays_and_threads_do_not_cut_each_other_s_lines(path: Path) -> None:
    audit("drain", kind="0", who="first")
    configure_audit("gw-2", str(path))

    def write(number: int) -> None:
        for _ in range(50):
            audit("drain", kind=str(number), who="x" * 500)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 201


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"audit-log: cannot open {tmp_path}: Is a directory"):
        configure_audit("gw-1", str(tmp_path))


def test_a_line_is_short_and_one_for_every_reader(path: Path) -> None:
    audit("proof_failed", path="/\x85\u2028\x9b2J" + "x" * 100_000)
    text = path.read_text()
    assert text.rstrip("\n").isprintable()
    assert len(text) < 2 * MAX_CHARS
    assert json.loads(text)["path"].startswith("/\x85\u2028\x9b2Jxxx")


def test_a_line_that_cannot_be_written_hinders_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "logs" / "audit.jsonl"
    place.parent.mkdir()
    configure_audit("gw-1", str(place))
    try:
        audit("drain", who="first")
        place.parent.rename(tmp_path / "gone")
        module._reopen()
        audit("drain", who="lost")
        assert "No such file or directory" in capfd.readouterr().err
        place.parent.mkdir()
        audit("drain", who="second")
        assert [each["who"] for each in lines(place)] == ["second"]
    finally:
        configure_audit("", None)


def test_strangers_cannot_fill_the_disk(path: Path) -> None:
    for number in range(5000):
        audit("proof_failed", whence=f"10.0.0.{number % 250}")
    audit("drain", who="ops")
    assert len(lines(path)) == MOST_A_MINUTE + 1, "others' lines are written all the same"


def record(event: str, kind: str, at_s: float) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": event, "kind": kind, "facts": {}})
    made.created = at_s
    return made


def test_the_next_line_says_how_many_were_left_out() -> None:
    throttle = Throttle(MOST_A_MINUTE, FEWER)
    assert sum(throttle.filter(record("proof_failed", "", 100.0)) for _ in range(100)) == 60
    after = record("proof_failed", "", 160.0)
    assert throttle.filter(after)
    assert vars(after)["facts"] == {"left_out": 40}
    again = record("proof_failed", "", 160.1)
    assert throttle.filter(again)
    assert vars(again)["facts"] == {}


def test_a_route_that_is_asked_each_second_is_written_once_a_minute_for_each_who() -> None:
    throttle = Throttle(MOST_A_MINUTE, FEWER)
    for second in range(120):
        for who in ("ann", "bob"):
            assert throttle.filter(record(OPERATOR_ROUTE, who, second)) == (second % 60 == 0)


def test_kinds_are_bounded() -> None:
    throttle = Throttle(MOST_A_MINUTE, FEWER)
    written = sum(throttle.filter(record("removal", str(n), 1.0)) for n in range(10 * MAX_KINDS))
    assert written == MAX_KINDS + MOST_A_MINUTE
    assert len(throttle._left_out) <= MAX_KINDS
    assert throttle.filter(record("drain", "ops", 1.0)), "other events have lines of their own"
