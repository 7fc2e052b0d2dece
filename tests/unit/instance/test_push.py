"""A push brings every block whole to every destination, whatever the order of events, and holds
its pages as long.
"""

from __future__ import annotations

import pytest

from mooncake.instance.push import Destination, Push
from tests.support.duo import LAYOUT, Duo


class Log:
    """Remembers what a destination reported."""

    def __init__(self) -> None:
        self.whole: list[int] = []
        self.errors: list[str] = []

    def __call__(self, destination: Destination, whole: list[int], now: float) -> None:
        self.whole += whole
        if destination.error is not None:
            self.errors.append(destination.error)


def open_push(duo: Duo, num_blocks: int) -> tuple[Push, list[int]]:
    push = Push(duo.mover, duo.pool, timeout_s=30.0)
    pages = duo.pool.allocate(num_blocks)
    assert pages is not None
    for index, page in enumerate(pages):
        push.add_block(index, page)
    return push, pages


def test_layers_arrive_one_by_one() -> None:
    duo, log = Duo(), Log()
    push, pages = open_push(duo, 2)
    push.add_destination(duo.places([4, 1]), [0, 1], log, duo.heap.now())
    for layer in range(LAYOUT.num_layers):
        for page in pages:
            duo.fill_page(page, layer + 1)
        push.advance([0, 1], layer + 1, duo.heap.now())
        duo.run()
        assert (log.whole == [0, 1]) == (layer + 1 == LAYOUT.num_layers)
    assert [duo.pool_bytes(4), duo.pool_bytes(1)] == [duo.page_bytes(page) for page in pages]


def test_a_late_destination_catches_up() -> None:
    duo, log = Duo(), Log()
    push, pages = open_push(duo, 3)
    expected = [duo.fill_page(page) for page in pages]
    push.advance([0, 1], LAYOUT.num_layers, duo.heap.now())
    destination = push.add_destination(duo.places([0, 2, 3]), [0, 1, 2], log, duo.heap.now())
    duo.run()
    assert log.whole == [0, 1]
    assert not destination.complete
    push.advance([2], LAYOUT.num_layers, duo.heap.now())
    duo.run()
    assert destination.complete
    assert [duo.pool_bytes(block) for block in (0, 2, 3)] == expected


def test_destinations_are_independent() -> None:
    duo, good, bad = Duo(), Log(), Log()
    push, pages = open_push(duo, 1)
    expected = duo.fill_page(pages[0])
    beyond = duo.places([99])
    first = push.add_destination(beyond, [0], bad, duo.heap.now())
    second = push.add_destination(duo.places([5]), [0], good, duo.heap.now())
    push.advance([0], LAYOUT.num_layers, duo.heap.now())
    duo.run()
    assert first.error is not None
    assert "refuses" in first.error
    assert bad.errors
    assert not bad.whole
    assert second.complete
    assert duo.pool_bytes(5) == expected


def test_a_destination_may_want_no_block_at_all() -> None:
    duo, log = Duo(), Log()
    push, _ = open_push(duo, 1)
    assert push.add_destination(duo.places([]), [], log, duo.heap.now()).complete


def test_pages_are_held_until_nothing_is_in_flight() -> None:
    duo, log = Duo(), Log()
    push, pages = open_push(duo, 2)
    duo.pool.release(pages)  # the sequence ends; the push goes on
    push.add_destination(duo.places([0, 1]), [0, 1], log, duo.heap.now())
    push.advance([0, 1], LAYOUT.num_layers, duo.heap.now())
    released: list[float] = []
    push.close(duo.heap.now(), released.append)
    assert duo.pool.num_held == 2
    assert not released
    duo.run()
    assert duo.pool.num_held == 0
    assert len(released) == 1
    assert not log.whole, "a closed push reports no more"


def test_a_closed_push_takes_nothing_more() -> None:
    duo = Duo()
    push, _ = open_push(duo, 1)
    push.close(duo.heap.now())
    with pytest.raises(ValueError, match="no more blocks"):
        push.add_block(7, 7)
    with pytest.raises(ValueError, match="no more destinations"):
        push.add_destination(duo.places([]), [], Log(), duo.heap.now())
    with pytest.raises(ValueError, match="closed already"):
        push.close(duo.heap.now())


def test_a_dead_peer_fails_the_destination() -> None:
    duo, log = Duo(), Log()
    push, _ = open_push(duo, 1)
    push.add_destination(duo.places([0]), [0], log, duo.heap.now())
    duo.network.detach("there")
    push.advance([0], LAYOUT.num_layers, duo.heap.now())
    duo.run()
    assert log.errors == ["the peer does not answer"]
