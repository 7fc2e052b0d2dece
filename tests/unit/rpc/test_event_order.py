"""Batches of an engine's events in their order: gaps, replays, engines that begin anew."""

from __future__ import annotations

from mooncake.rpc.kv_event_reader import EventOrder

Usable = list[bytes | None]


def batch(number: int, life: str = "a") -> bytes:
    return f"{life}{number}".encode()


def live(order: EventOrder, *numbers: int, life: str = "a") -> Usable:
    return [each for n in numbers for each in order.live(n, batch(n, life))]


def replay(order: EventOrder, *numbers: int, life: str = "a") -> Usable:
    for number in numbers:
        order.replayed(number, batch(number, life))
    return order.end_replay()


def batches(*numbers: int, life: str = "a") -> Usable:
    return [batch(number, life) for number in numbers]


def test_without_replays_it_begins_anywhere_and_a_gap_is_a_loss() -> None:
    order = EventOrder(can_replay=False)
    assert order.asks_from is None
    assert live(order, 7, 8) == batches(7, 8)
    assert live(order, 10, 11) == [None, *batches(10, 11)]
    assert live(order, 0, 1) == [None, *batches(0, 1)]  # another process
    assert order.end_replay() == []


def test_it_begins_with_what_the_engine_still_has() -> None:
    order = EventOrder(can_replay=True)
    assert order.asks_from == 0
    assert live(order, 4, 5) == []
    assert replay(order, 0, 1, 2, 3, 4) == batches(0, 1, 2, 3, 4, 5)
    assert order.asks_from is None
    assert live(order, 6) == batches(6)


def test_what_the_engine_has_no_more_is_a_loss() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 3, 4) == [None, *batches(3, 4)]
    assert live(order, 5) == batches(5)


def test_a_gap_is_filled_by_a_replay() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 0) == batches(0)
    assert live(order, 3, 4) == []
    assert order.asks_from == 1
    assert replay(order, 1, 2, 3) == batches(1, 2, 3, 4)
    assert live(order, 5) == batches(5)


def test_a_gap_that_no_replay_fills_is_a_loss() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 0) == batches(0)
    assert live(order, 3) == []
    assert replay(order) == [None, *batches(3)]


def test_an_engine_that_begins_anew_is_read_from_its_begin() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 0, 1, 2) == batches(0, 1, 2)
    assert live(order, 1, life="b") == [None]
    assert order.asks_from == 0
    assert replay(order, 0, 1, life="b") == batches(0, 1, life="b")
    assert live(order, 2, life="b") == batches(2, life="b")


def test_an_engine_that_begins_anew_during_a_replay() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 0, 1, 2, 3) == batches(0, 1, 2, 3)
    assert live(order, 6) == []
    assert live(order, 0, life="b") == []  # its process is another one, which has no number 4
    assert replay(order) == [None]
    assert order.asks_from == 0
    assert replay(order, 0, life="b") == batches(0, life="b")
    assert live(order, 1, life="b") == batches(1, life="b")


def test_a_late_end_of_an_earlier_replay_changes_nothing() -> None:
    order = EventOrder(can_replay=True)
    assert replay(order, 0) == batches(0)
    order.replayed(1, batch(1))
    assert order.end_replay() == []
    assert live(order, 1) == batches(1)


def test_a_restart_asks_for_everything_again() -> None:
    order = EventOrder(can_replay=True)
    replay(order, 0, 1)
    order.restart()
    assert order.asks_from == 0
    assert replay(order, 0, 1) == batches(0, 1)
    without = EventOrder(can_replay=False)
    live(without, 5)
    without.restart()
    assert live(without, 3) == batches(3)
