"""What the clients of `benchmarks pauses` have said, as figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.streams import Streams


def streams(tmp_path: Path, *lines: str) -> Streams:
    """Return what two clients have said."""
    log = tmp_path / "log"
    log.write_text("".join(f"{line}\n" for line in lines))
    return Streams(log, 2)


def test_a_pause_is_the_longest_time_without_a_token_of_any_client(tmp_path: Path) -> None:
    seen = streams(
        tmp_path, "token 0 10", "token 1 10.5", "token 0 11", "token 1 14", "token 0 15.5",
        "token 1 16",
    )  # fmt: skip
    assert seen.pause_s(9.0, 12.0) == 1.5, "the first tokens of client 1 came at 10.5 and 14"
    assert seen.pause_s(10.7, 16.0) == 4.5
    assert seen.pause_s(15.7, 16.0) == 2.0, "one that began earlier ends here"
    assert seen.pause_s(15.7, 40.0) == 24.5, "no token has come since"


def test_a_client_without_a_token_has_paused_all_the_time(tmp_path: Path) -> None:
    assert streams(tmp_path, "token 0 1", "token 0 2", "token 0 3").pause_s(1.0, 3.0) == 2.0


def test_failures_are_counted_from_a_moment_on(tmp_path: Path) -> None:
    seen = streams(tmp_path, "failed 0 1", "failed 1 2", "ended 0 3", "failed 1 3")
    assert [seen.num_failed(at_s) for at_s in (0.0, 1.0, 2.5, 3.0)] == [3, 2, 1, 0]


@pytest.mark.parametrize("behind", [0, 1])
def test_each_client_has_to_go_on(tmp_path: Path, behind: int) -> None:
    """A line that is not whole yet is read once it is."""
    log = tmp_path / "log"
    log.write_text("ended 0 1\n")
    seen = Streams(log, 2)

    def write() -> bool:
        ahead = f"ended {1 - behind} 2\nended {1 - behind} 3\nended {behind} 2\n"
        log.write_text(f"ended 0 1\n{ahead}ended {behind}")
        return True

    assert not seen.go_on(2, 0.1, write)
    with log.open("a") as file:
        file.write(" 4\n")
    assert seen.num_failed(0.0) == 0
    assert seen.pause_s(0.0, 5.0) == 5.0
    with log.open("a") as file:
        file.write("ended 0 5\nended 1 5\n")
    assert not seen.go_on(1, 0.0), "what was said before counts no more"


def test_what_was_killed_has_to_be_there_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    looks = []

    def holds() -> bool:
        looks.append(len(looks))
        if len(looks) == 1:
            log.write_text("ended 0 1\nended 1 1\n")
        return len(looks) > 2

    assert Streams(log, 2).go_on(1, 30.0, holds)
    assert len(looks) == 3, "then nobody looks any more"
