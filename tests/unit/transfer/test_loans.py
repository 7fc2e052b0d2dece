"""Loans: exact to the piece, counted, and over when they are taken back."""

from __future__ import annotations

import threading

import pytest

from mooncake.transfer.engine import Pieces
from mooncake.transfer.grants import Loans
from mooncake.transfer.regions import Gates, RangeRefused, RegionTable, withdrawn

SIZE = 100
REGION = 3


def pieces(*numbers: int) -> Pieces:
    return Pieces([number * SIZE for number in numbers], SIZE)


@pytest.fixture
def loans() -> Loans:
    made = Loans(lambda: None)
    made.lend("a", REGION, pieces(1, 2, 5), write=True)
    made.lend("a", REGION, pieces(4), write=False)
    return made


@pytest.mark.parametrize(
    ("start", "stop", "covered"),
    [
        (100, 200, True), (100, 300, True), (150, 151, True), (299, 300, True), (500, 600, True),
        (99, 200, False), (100, 301, False), (200, 600, False), (0, 10**9, False),
        (600, 601, False),
    ],
)  # fmt: skip
def test_a_range_is_covered_by_what_is_lent_and_nothing_else(
    loans: Loans, start: int, stop: int, covered: bool
) -> None:
    wanted = (REGION, start, stop - start)
    for ranges in ([wanted], [(REGION, 100, SIZE), wanted], [wanted, (REGION, 500, 1)]):
        assert (loans.find("a", ranges, write=True) is not None) == covered
    for stranger in (
        loans.find("b", [wanted], write=True),
        loans.find("a", [wanted], write=False),
        loans.find("a", [(REGION + 1, start, stop - start)], write=True),
    ):
        assert stranger is None


def test_a_loan_ends_when_it_was_taken_back_as_often_as_it_was_lent(loans: Loans) -> None:
    loans.lend("a", REGION, pieces(1), write=True)
    held = loans.find("a", [(REGION, 100, 200)], write=True)
    assert held is not None
    assert loans.num_open == 5
    loans.take_back("a", REGION, pieces(1), write=True)
    assert withdrawn(held) is None
    loans.take_back("a", REGION, pieces(1), write=True)
    assert withdrawn(held) == "the loan of this memory has ended"
    assert loans.find("a", [(REGION, 100, SIZE)], write=True) is None
    loans.lend("a", REGION, pieces(1), write=True)
    assert withdrawn(held) is not None, "what was begun before stays over"
    assert loans.find("a", [(REGION, 100, SIZE)], write=True) is not None


def test_taking_back_waits_for_threads_that_touch_the_piece() -> None:
    gates = Gates()
    gate, loans = gates.new(), Loans(gates.pass_all)
    loans.lend("a", REGION, pieces(1), write=True)
    held = loans.find("a", [(REGION, 100, 1)], write=True)
    assert held is not None
    with gate:
        back = threading.Thread(
            target=loans.take_back, args=("a", REGION, pieces(1)), kwargs={"write": True}
        )
        back.start()
        back.join(0.05)
        assert back.is_alive(), "a thread is at it"
    back.join()
    assert withdrawn(held) is not None


def test_the_table_says_what_clients_may_do() -> None:
    table = RegionTable(Gates())
    with pytest.raises(RangeRefused, match="may not read this memory: a pool client reaches"):
        table.borrowed("a", [(1, 0, 1)], write=False)
    table.close()
