"""Prefixes that an engine reads before requests ask for them: piece by piece, behind the fetches of
requests, into free pages only, and nothing is lost when it fails.
"""

from __future__ import annotations

from mooncake.base import BlockSource, PinBlocks
from mooncake.base.messages import Prefetch
from mooncake.instance.reuse import MAX_RUNS, PIECE_BYTES, ReadAhead
from tests.support.engine.engine_pair import NUM_PAGES
from tests.unit.instance.test_fetch import KEYS, STORE, Scene


class Ahead(Scene):
    """An engine of 8 free pages that reads two blocks at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.engine_pair.pool
        self.subject = ReadAhead(self.pool, self.fetches, PIECE_BYTES // 2)

    def add(self, keys: list[bytes], *, has_source: bool = True) -> None:
        sources = [BlockSource(store=STORE, first=0, stop=len(keys))] if has_source else []
        self.subject.add(Prefetch(reader=STORE, ticket=1, keys=keys, sources=sources))

    def advance(self, *, leaving: bool = False) -> None:
        self.subject.advance(self.engine_pair.heap.now(), leaving=leaving)
        self.engine_pair.run()

    def asked(self) -> list[PinBlocks]:
        return [m for m in self.engine_pair.there_inbox if isinstance(m, PinBlocks)]

    def answer(self, num_blocks: int) -> None:
        """Answer the latest question, and let the blocks arrive."""
        self.grant(list(range(num_blocks)), self.asked()[-1].ticket)
        self.engine_pair.run()

    def check_all_free_or_cached(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_held == 0
        assert self.reader.num_open == 0


def test_a_run_comes_in_pieces_and_can_be_matched() -> None:
    scene = Ahead()
    wanted = [scene.engine_pair.fill_pool(0, 7), scene.engine_pair.fill_pool(1, 8)]
    scene.add(KEYS)
    for _ in range(2):
        scene.advance()
        scene.answer(2)
    scene.advance()
    assert [pin.keys for pin in scene.asked()] == [KEYS[:2], KEYS[2:]]
    pages = scene.pool.match(KEYS)
    assert [scene.engine_pair.page_bytes(page) for page in pages[:2]] == wanted
    assert len(pages) == scene.subject.num_blocks_read == 4
    scene.check_all_free_or_cached()


def test_it_counts_no_use_of_the_blocks_before_a_piece() -> None:
    scene = Ahead()
    scene.add(KEYS)
    scene.advance()
    scene.answer(2)
    scene.advance()
    head = scene.asked()[1].head
    assert (head.keys, head.num_counted) == (KEYS[:2], 2)


def test_a_piece_waits_while_a_request_fetches() -> None:
    scene = Ahead()
    scene.start(1)
    scene.add(KEYS)
    scene.advance()
    assert len(scene.asked()) == 1, "that of the request"
    scene.answer(1)
    scene.advance()
    assert scene.asked()[1].keys == KEYS[:2]


def test_half_of_the_pages_stay_as_they_are() -> None:
    scene = Ahead()
    held = scene.pool.allocate(NUM_PAGES // 2 - 2)
    scene.add(KEYS)
    scene.advance()
    scene.answer(2)
    scene.advance()
    assert len(scene.asked()) == 1
    assert scene.subject.num_blocks_read == 2
    scene.pool.release(held or [])
    scene.advance()
    assert len(scene.asked()) == 1, "the rest is dropped, not kept for later"
    scene.check_all_free_or_cached()


def test_what_the_pool_lacks_is_dropped_and_the_next_run_comes() -> None:
    scene = Ahead()
    scene.add(KEYS[:2])
    scene.add(KEYS[2:])
    scene.advance()
    scene.answer(1)
    scene.advance()
    scene.answer(0)
    scene.advance()
    assert [pin.keys for pin in scene.asked()] == [KEYS[:2], KEYS[2:]]
    assert scene.pool.match(KEYS) != []
    scene.check_all_free_or_cached()


def test_a_lost_node_is_no_error() -> None:
    scene = Ahead()
    scene.add(KEYS)
    scene.advance()
    scene.reader.on_peer_lost(STORE, scene.engine_pair.heap.now())
    scene.advance()
    assert len(scene.asked()) == 1
    scene.check_all_free_or_cached()


def test_what_is_here_is_not_read_again() -> None:
    scene = Ahead()
    pages = scene.pool.allocate(4) or []
    for key, page in zip(KEYS, pages, strict=True):
        scene.pool.publish(key, page)
    scene.pool.release(pages)
    scene.add(KEYS)
    scene.advance()
    assert scene.asked() == []


def test_an_engine_that_leaves_reads_no_more() -> None:
    scene = Ahead()
    scene.add(KEYS)
    scene.advance()
    scene.answer(2)
    scene.advance(leaving=True)
    scene.advance()
    assert len(scene.asked()) == 1
    scene.check_all_free_or_cached()


def test_runs_without_a_source_and_too_many_are_not_taken() -> None:
    scene = Ahead()
    scene.add(KEYS, has_source=False)
    scene.advance()
    assert scene.asked() == []
    for number in range(MAX_RUNS + 1):
        scene.add([number.to_bytes(16, "big")])
    for _ in range(MAX_RUNS):
        scene.advance()
        scene.answer(0)
    scene.advance()
    assert len(scene.asked()) == MAX_RUNS
