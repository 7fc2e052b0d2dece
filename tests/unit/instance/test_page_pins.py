"""Pins of an instance's pages: they hold what a reader is told of until it unpins or is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import BlockPlaces, KvLayout, PageArray, SegmentRef
from mooncake.base.messages import PinBlocks, PinGranted, Unpin, WorkerRef
from mooncake.base.pool_messages import AnyMessage
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.instance import page_pins
from mooncake.instance.mover import BlockChecksums
from mooncake.instance.page_pins import PagePins

OWN, READER = WorkerRef("decode-0", "e", "a"), WorkerRef("decode-1", "e", "b")
KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]
SEGMENT = SegmentRef("engine", {}, "host")
LAYOUT = KvLayout(num_layers=2, block_tokens=2, kv_width=4, dtype="float32", fingerprint="f")
REPEAT_S = 10.0


class Sent:
    """A channel that keeps what is sent."""

    address = "a"

    def __init__(self) -> None:
        self.messages: list[PinGranted] = []

    def send(self, address: str, message: AnyMessage) -> None:
        assert address == READER.address
        assert isinstance(message, PinGranted)
        self.messages.append(message)

    def figures(self) -> dict[str, float]:
        return {}


class HashingRank:
    """A rank whose hashes come when the test says so."""

    array = PageArray(LAYOUT, 8)

    def hash(self, pages: Sequence[int]) -> int:
        self.pages = list(pages)
        return 7


def setup(*ranks: HashingRank) -> tuple[PagePins, BlockPool, Sent, BlockChecksums]:
    """Return pins of a pool in which the first three keys are cached."""
    pool, sent = BlockPool(8), Sent()
    pages = pool.allocate(3)
    assert pages is not None
    for key, page in zip(KEYS, pages, strict=False):
        pool.publish(key, page)
    pool.release(pages)
    checksums = BlockChecksums(ranks)

    def places(of: Sequence[int]) -> BlockPlaces:
        return BlockPlaces(SEGMENT, 1, 0, [page * 100 for page in of])

    return PagePins(OWN, sent, pool, places, checksums, REPEAT_S), pool, sent, checksums


def pin(ticket: int = 1) -> PinBlocks:
    return PinBlocks(reader=READER, ticket=ticket, keys=KEYS)


def test_a_pin_holds_the_run_that_is_here_until_it_is_unpinned() -> None:
    pins, pool, sent, _ = setup()
    pins.on_pin(pin(), 0.0)
    [granted] = sent.messages
    assert granted.store == OWN
    assert granted.asker == READER
    assert granted.num_blocks == 3
    assert granted.places.offsets == [page * 100 for page in pool.match(KEYS)]
    assert (pool.num_held, pins.num_open) == (3, 1)
    assert pool.allocate(6) is None, "pinned pages are not given to others"
    pins.on_pin(pin(), 1.0)
    assert sent.messages == [granted, granted], "asked again, it is answered again"
    pins.on_unpin(Unpin(reader=READER, ticket=1))
    pins.on_unpin(Unpin(reader=READER, ticket=1))
    assert (pool.num_held, pins.num_open, pins.num_blocks_read) == (0, 0, 3)


def test_what_is_not_here_is_answered_and_holds_nothing() -> None:
    pins, pool, sent, _ = setup()
    pins.on_pin(PinBlocks(reader=READER, ticket=1, keys=KEYS[3:]), 0.0)
    assert [message.num_blocks for message in sent.messages] == [0]
    assert (pool.num_held, pins.num_open) == (0, 0)


def test_a_lost_reader_holds_nothing_and_a_later_epoch_of_it_keeps_its_own() -> None:
    pins, pool, _, _ = setup()
    pins.on_pin(pin(), 0.0)
    pins.on_peer_lost(WorkerRef("decode-1", "before", "b"))
    assert pins.num_open == 1
    pins.on_peer_lost(READER)
    assert (pool.num_held, pins.num_open, pins.num_blocks_read) == (0, 0, 0)


def test_a_reader_that_has_pinned_for_long_is_answered_again_and_asked_about() -> None:
    pins, _, sent, _ = setup()
    assert pins.tick(0.0) == ([], None)
    pins.on_pin(pin(), 0.0)
    assert pins.tick(1.0) == ([], REPEAT_S)
    assert pins.tick(REPEAT_S) == ([READER], 2 * REPEAT_S)
    assert len(sent.messages) == 2


def test_with_too_many_pins_nothing_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pins, "MAX_PINS", 1)
    pins, _, sent, _ = setup()
    pins.on_pin(pin(1), 0.0)
    pins.on_pin(pin(2), 0.0)
    assert [message.num_blocks for message in sent.messages] == [3, 0]


def test_checksums_come_with_the_answer_and_pages_are_held_while_they_are_taken() -> None:
    rank = HashingRank()
    pins, pool, sent, checksums = setup(rank)
    pins.on_pin(pin(1), 0.0)
    pins.tick(REPEAT_S)
    assert sent.messages == []
    checksums.on_done(Hashed(7, [11, 12, 13]), 0.5)
    assert [message.checksums for message in sent.messages] == [[11, 12, 13]]
    pins.on_unpin(Unpin(reader=READER, ticket=1))
    pins.on_pin(pin(2), 1.0)
    pins.on_unpin(Unpin(reader=READER, ticket=2))
    assert (pool.num_held, pins.num_open) == (3, 1), "they are still being hashed"
    checksums.on_done(Hashed(7, [11, 12, 13]), 2.0)
    assert (pool.num_held, pins.num_open, len(sent.messages)) == (0, 0, 1)
