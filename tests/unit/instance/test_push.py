"""A push brings every block whole to every destination, whatever the order of events, and holds
its pages as long.
"""

from __future__ import annotations

import pytest

from mooncake.instance.push import Destination, Push
from tests.support.engine.engine_pair import LAYOUT, EnginePair


class Log:
    """Remembers what a destination reported."""

    def __init__(self) -> None:
        self.whole: list[int] = []
        self.errors: list[str] = []

    def __call__(self, destination: Destination, whole: list[int], now: float) -> None:
        self.whole += whole
        if destination.error is not None:
            self.errors.append(destination.error)


def open_push(engine_pair: EnginePair, num_blocks: int) -> tuple[Push, list[int]]:
    push = Push(engine_pair.mover, engine_pair.pool, timeout_s=30.0)
    pages = engine_pair.pool.allocate(num_blocks)
    assert pages is not None
    for index, page in enumerate(pages):
        push.add_block(index, page)
    return push, pages


def test_layers_arrive_one_by_one() -> None:
    engine_pair, log = EnginePair(), Log()
    push, pages = open_push(engine_pair, 2)
    push.add_destination(engine_pair.places([4, 1]), [0, 1], log, engine_pair.heap.now())
    for layer in range(LAYOUT.num_layers):
        for page in pages:
            engine_pair.fill_page(page, layer + 1)
        push.advance([0, 1], layer + 1, engine_pair.heap.now())
        engine_pair.run()
        assert (log.whole == [0, 1]) == (layer + 1 == LAYOUT.num_layers)
    assert [engine_pair.pool_bytes(4), engine_pair.pool_bytes(1)] == [
        engine_pair.page_bytes(page) for page in pages
    ]


def test_a_late_destination_catches_up() -> None:
    engine_pair, log = EnginePair(), Log()
    push, pages = open_push(engine_pair, 3)
    expected = [engine_pair.fill_page(page) for page in pages]
    push.advance([0, 1], LAYOUT.num_layers, engine_pair.heap.now())
    destination = push.add_destination(
        engine_pair.places([0, 2, 3]), [0, 1, 2], log, engine_pair.heap.now()
    )
    engine_pair.run()
    assert log.whole == [0, 1]
    assert not destination.complete
    push.advance([2], LAYOUT.num_layers, engine_pair.heap.now())
    engine_pair.run()
    assert destination.complete
    assert [engine_pair.pool_bytes(block) for block in (0, 2, 3)] == expected


def test_destinations_are_independent() -> None:
    engine_pair, good, bad = EnginePair(), Log(), Log()
    push, pages = open_push(engine_pair, 1)
    expected = engine_pair.fill_page(pages[0])
    beyond = engine_pair.places([99])
    first = push.add_destination(beyond, [0], bad, engine_pair.heap.now())
    second = push.add_destination(engine_pair.places([5]), [0], good, engine_pair.heap.now())
    push.advance([0], LAYOUT.num_layers, engine_pair.heap.now())
    engine_pair.run()
    assert first.error is not None
    assert "refuses" in first.error
    assert bad.errors
    assert not bad.whole
    assert second.complete
    assert engine_pair.pool_bytes(5) == expected


def test_a_destination_may_want_no_block_at_all() -> None:
    engine_pair, log = EnginePair(), Log()
    push, _ = open_push(engine_pair, 1)
    assert push.add_destination(engine_pair.places([]), [], log, engine_pair.heap.now()).complete


def test_pages_are_held_until_nothing_is_in_flight() -> None:
    engine_pair, log = EnginePair(), Log()
    push, pages = open_push(engine_pair, 2)
    engine_pair.pool.release(pages)  # the sequence ends; the push goes on
    push.add_destination(engine_pair.places([0, 1]), [0, 1], log, engine_pair.heap.now())
    push.advance([0, 1], LAYOUT.num_layers, engine_pair.heap.now())
    released: list[float] = []
    push.close(engine_pair.heap.now(), released.append)
    assert engine_pair.pool.num_held == 2
    assert not released
    engine_pair.run()
    assert engine_pair.pool.num_held == 0
    assert len(released) == 1
    assert not log.whole, "a closed push reports no more"


def test_a_closed_push_takes_nothing_more() -> None:
    engine_pair = EnginePair()
    push, _ = open_push(engine_pair, 1)
    push.close(engine_pair.heap.now())
    with pytest.raises(ValueError, match="no more blocks"):
        push.add_block(7, 7)
    with pytest.raises(ValueError, match="no more destinations"):
        push.add_destination(engine_pair.places([]), [], Log(), engine_pair.heap.now())
    with pytest.raises(ValueError, match="closed already"):
        push.close(engine_pair.heap.now())


def test_a_dead_peer_fails_the_destination() -> None:
    engine_pair, log = EnginePair(), Log()
    push, _ = open_push(engine_pair, 1)
    push.add_destination(engine_pair.places([0]), [0], log, engine_pair.heap.now())
    engine_pair.network.detach("there")
    push.advance([0], LAYOUT.num_layers, engine_pair.heap.now())
    engine_pair.run()
    assert log.errors == ["the peer does not answer"]
