"""The turns of gets by questions and by pins, and their table."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks import pool_questions
from benchmarks.pool_questions import Rounds, Turns, pins_alone, table
from benchmarks.pool_values import Ours
from mooncake.kvstore.client import block_reader

KIB, MIB = 2**10, 2**20


class FakePool:
    """A pool whose gets ask as the client would, and take one second by pins, half by question."""

    def __init__(self, *, answers: bool = True, most: int = 4 * MIB) -> None:
        self.num_asked = 0
        self.stored: set[str] = set()
        self._answers = answers
        self._most = most

    def put(self, name: str, _start: int, _size: int) -> float:
        assert name not in self.stored
        self.stored.add(name)
        return 3.0

    def get(self, name: str, _start: int, size: int) -> float:
        assert name in self.stored
        asks = self._answers and block_reader.MAX_UNANSWERED > 0 and size <= self._most
        self.num_asked += asks
        return 0.5 if asks else 1.0

    def remove(self, name: str, _size: int) -> None:
        self.stored.remove(name)

    def figures(self) -> tuple[float, int]:
        return 0.0, self.num_asked


def turns(pool: FakePool, size: int) -> Turns:
    return Turns((size, 1), cast(Ours, pool), None)


def test_both_ways_take_turns_over_the_same_values() -> None:
    pool = FakePool()
    taken = turns(pool, MIB)
    taken.run(3)
    assert taken.rounds["question get"] == [0.5] * 3
    assert taken.rounds["pins get"] == [1.0] * 3
    assert taken.rounds["put"] == [3.0] * 3
    assert not pool.stored


def test_large_values_go_by_pins_in_both_ways() -> None:
    taken = turns(FakePool(), 8 * MIB)
    taken.run(2)
    assert taken.rounds["question get"] == taken.rounds["pins get"] == [1.0] * 2


def test_a_get_that_asked_no_question_is_no_figure_of_questions() -> None:
    with pytest.raises(RuntimeError, match="question get of 64 KiB: the node had 0 questions"):
        turns(FakePool(answers=False), 64 * KIB).run(1)


def test_gets_ask_again_after_pins_alone() -> None:
    before = block_reader.MAX_UNANSWERED
    with pins_alone():
        assert block_reader.MAX_UNANSWERED == 0
    assert before == block_reader.MAX_UNANSWERED > 0


def figures(upstream: bool) -> Rounds:
    row = {
        "put": [0.003], "question get": [0.001], "pins get": [0.002],
        "question get cpu": [0.004], "pins get cpu": [0.005],
    }  # fmt: skip
    return row | ({"upstream put": [0.006], "upstream get": [0.0005]} if upstream else {})


def test_the_table_has_upstream_where_it_was_measured() -> None:
    lines = table({(64 * KIB, 1): figures(True), (MIB, 8): figures(True)}).splitlines()
    assert lines[2] == (
        "| 64 KiB | 1.00 | 2.00 | 2.00x | 0.80x | 3.00 | 0.50 | 0.50x | 6.00 | 2.00x |"
    )
    assert lines[3].startswith("| 8 x 128 KiB |")
    assert "upstream" not in table({(64 * KIB, 1): figures(False)})


@pytest.mark.parametrize(
    "words", [["--sizes", "64KiB", "--keys", "3"], ["--sizes", "1GiB"], ["--sizes", "much"],
              ["--keys", "0"]],
)  # fmt: skip
def test_values_that_cannot_be_cut_are_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pool_questions.main([*words, "--no-upstream"])
    said = capsys.readouterr().err
    assert "cannot be cut" in said or "not a size" in said


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pool_questions.main(["--help"])
    assert "examples:\n  python -m benchmarks pool-questions" in capsys.readouterr().out
