"""Fetch: blocks of a pool node into pages of this instance, through the `BlockReader`.

A lost cache is a miss: a fetch ends exactly once, with the number of leading blocks that arrived,
and only when nothing writes to its pages any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import BlockPlaces
from mooncake.base.messages import NO_HEAD, ChainHead, WorkerRef
from mooncake.instance.mover import Ended, OwnPages, SliceMover
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult

Fetched = Callable[[int, float], None]
"""(number of leading blocks that arrived, now)"""
Moved = Callable[[WorkerRef, ReadResult], None]
"""(pool node, how a fetch from it ended): from it is learnt how fast pool nodes are."""


class PageReads:
    """Reads blocks into pages of this instance, into every memory that holds them: the `ReadPort`
    of its reader.
    """

    def __init__(self, mover: SliceMover, own: OwnPages, ended: Ended) -> None:
        """`ended` is called with the end of each read."""
        self._mover = mover
        self._own = own
        self._ended = ended

    def read(self, places: Sequence[int], there: BlockPlaces, deadline_s: float) -> int:
        return self._mover.read(places, there, deadline_s, self._ended)

    def cancel(self, number: int) -> None:
        self._mover.cancel(number)

    def checksum(self, places: Sequence[int], index: int) -> int:
        """Return the checksum of a block that was read; 0: its copies in several memories differ,
        as no block is promised to be.
        """
        page, own = places[index], self._own
        found = self._mover.found_elsewhere(page)
        if own.array.holds(page):
            found.add(own.array.layers, own.checksum(page))
        return found.checksum


class Fetcher:
    """All fetches of one worker."""

    def __init__(
        self,
        reader: BlockReader,
        timeout_s: float,
        moved: Moved = lambda _store, _result: None,
    ) -> None:
        """`reader` reads into pages of this instance."""
        self._reader = reader
        self._timeout_s = timeout_s
        self._moved = moved
        self.num_blocks_fetched = 0
        self.num_fetches_failed = 0

    def start(
        self,
        store: WorkerRef,
        keys: list[BlockKey],
        pages: Sequence[int],
        now: float,
        fetched: Fetched,
        head: ChainHead = NO_HEAD,
    ) -> int:
        """Fetch the blocks `keys`, which follow `head`, into `pages` (held by the caller); return
        the fetch's number.
        """

        def ended(result: ReadResult, at: float) -> None:
            self._moved(store, result)
            self.num_blocks_fetched += result.num_blocks
            self.num_fetches_failed += result.num_blocks == 0
            fetched(result.num_blocks, at)

        return self._reader.start(store, keys, pages, now + self._timeout_s, ended, head=head)

    def cancel(self, number: int, now: float) -> None:
        """Stop a fetch; it still ends through its callback."""
        self._reader.cancel(number, now)
