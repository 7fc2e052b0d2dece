"""Each pushed block is compared once, whichever message names it first."""

from __future__ import annotations

from mooncake.decode.task import Comparison


def test_blocks_are_asked_about_once_and_the_wrong_ones_are_known() -> None:
    comparison = Comparison()
    assert comparison.ask([3, 4], [30, 40]) == [3, 4]
    assert comparison.open
    assert comparison.ask([3, 4, 5, 6], [30, 40, 50, 60]) == [5, 6]
    comparison.found([5, 6], [50, 61])
    assert comparison.open
    assert comparison.num_compared == 2
    comparison.found([3, 4], [31, 40])
    assert not comparison.open
    assert comparison.num_compared == 4
    assert comparison.wrong == [3, 6]


def test_what_has_no_checksum_is_not_compared() -> None:
    comparison = Comparison()
    assert comparison.ask([0, 1, 2], []) == []
    assert not comparison.open
    assert comparison.wrong == []
