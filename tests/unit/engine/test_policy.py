"""One total order: class, then arrival."""

from __future__ import annotations

from mooncake.base.request import Priority
from mooncake.engine.sequence import Sequence, last_in_order, rank
from tests.support.engine.engines import request


def sequence(arrival: int, priority: Priority) -> Sequence:
    made = Sequence(arrival, request([1], priority=priority))
    made.arrival = arrival
    return made


def test_class_comes_before_arrival() -> None:
    late_premium = sequence(9, Priority.PREMIUM)
    early_batch = sequence(1, Priority.BATCH)
    first = sequence(2, Priority.INTERACTIVE)
    second = sequence(3, Priority.INTERACTIVE)
    line = [second, early_batch, first, late_premium]
    assert sorted(line, key=rank) == [late_premium, first, second, early_batch]


def test_the_last_arrived_of_the_lowest_class_yields() -> None:
    line = [sequence(number, Priority.INTERACTIVE) for number in range(3)]
    assert last_in_order(line) is line[2]
    batch = sequence(0, Priority.BATCH)
    assert last_in_order([*line, batch]) is batch
    assert last_in_order([]) is None
