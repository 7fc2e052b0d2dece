"""A push brings every block whole to every destination, whatever the order of events, and holds
its pages as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.instance.mover import BlockChecksums, OwnPages
from mooncake.instance.push import Destination, Push
from tests.support.engine.engine_pair import LAYOUT, PAGES, EnginePair


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
    push.add_destination([engine_pair.part([4, 1], [0, 1])], log, engine_pair.heap.now())
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
        [engine_pair.part([0, 2, 3], [0, 1, 2])], log, engine_pair.heap.now()
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
    beyond = engine_pair.part([99], [0])
    first = push.add_destination([beyond], bad, engine_pair.heap.now())
    second = push.add_destination([engine_pair.part([5], [0])], good, engine_pair.heap.now())
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
    assert push.add_destination([engine_pair.part([], [])], log, engine_pair.heap.now()).complete


def test_pages_are_held_until_nothing_is_in_flight() -> None:
    engine_pair, log = EnginePair(), Log()
    push, pages = open_push(engine_pair, 2)
    engine_pair.pool.release(pages)  # the sequence ends; the push goes on
    push.add_destination([engine_pair.part([0, 1], [0, 1])], log, engine_pair.heap.now())
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
        push.add_destination([engine_pair.part([], [])], Log(), engine_pair.heap.now())
    with pytest.raises(ValueError, match="closed already"):
        push.close(engine_pair.heap.now())


def test_a_dead_peer_fails_the_destination() -> None:
    engine_pair, log = EnginePair(), Log()
    push, _ = open_push(engine_pair, 1)
    push.add_destination([engine_pair.part([0], [0])], log, engine_pair.heap.now())
    engine_pair.network.detach("there")
    push.advance([0], LAYOUT.num_layers, engine_pair.heap.now())
    engine_pair.run()
    assert log.errors == ["the peer does not answer"]


class SlowHasher:
    """Hashes when it is told to: the checksum of a page is 100 more than its number."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def start(self, pages: Sequence[int]) -> int:
        self.asked.append(list(pages))
        return len(self.asked) - 1

    def done(self, op_id: int) -> Hashed:
        return Hashed(op_id, [100 + page for page in self.asked[op_id]])


def own_pages(engine_pair: EnginePair, hasher: SlowHasher) -> OwnPages:
    return OwnPages(PAGES, engine_pair.transfer, engine_pair.pages, hasher)


def test_blocks_are_hashed_once_when_their_last_layer_goes_and_complete_when_that_is_done() -> None:
    engine_pair, log, plain = EnginePair(), Log(), Log()
    push, pages = open_push(engine_pair, 3)
    hasher = SlowHasher()
    checksums = BlockChecksums([own_pages(engine_pair, hasher)])
    now = engine_pair.heap.now()
    part = engine_pair.part([0, 1], [0, 2])
    destination = push.add_destination([part], log, now, checksums)
    other = push.add_destination([engine_pair.part([2, 3, 4], [0, 1, 2])], plain, now)
    push.advance([0], 1, now)
    assert not hasher.asked, "not final yet"
    push.advance([0, 1], LAYOUT.num_layers, now)
    assert hasher.asked == [[pages[0]]], "only what this destination takes"
    push.advance([0, 1, 2], LAYOUT.num_layers, now)
    assert hasher.asked == [[pages[0]], [pages[2]]]
    engine_pair.run()
    assert other.complete
    assert not destination.complete
    checksums.on_done(hasher.done(1), now)
    assert destination.checksums == {2: 100 + pages[2]}
    assert not destination.complete
    checksums.on_done(hasher.done(0), now)
    assert destination.complete
    assert destination.checksums == {0: 100 + pages[0], 2: 100 + pages[2]}
    assert sorted(log.whole) == [0, 0, 2, 2], "told when it was whole, and when it was hashed"


def test_a_closed_push_hears_no_more_of_its_hashes() -> None:
    engine_pair, log = EnginePair(), Log()
    push, _ = open_push(engine_pair, 1)
    hasher = SlowHasher()
    checksums = BlockChecksums([own_pages(engine_pair, hasher)])
    now = engine_pair.heap.now()
    push.add_destination([engine_pair.part([0], [0])], log, now, checksums)
    push.advance([0], LAYOUT.num_layers, now)
    push.close(now)
    engine_pair.run()
    told = list(log.whole)
    checksums.on_done(hasher.done(0), now)
    assert log.whole == told
