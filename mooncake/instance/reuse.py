"""Prefix reuse: gathers the longest prefix of a sequence that need not be computed into held pages.

It takes what lies in this instance's own pages, then fetches what the Conductor chose from pool
nodes. If a node fails, even in the middle of a read, another one that holds the same run is asked
for the rest. Fetched blocks are published like computed ones.

Read-ahead does the same for prefixes that a gateway calls busy, before requests ask for them.
Requests come first: a piece is begun only while none of them fetches, and half of the pages stay as
they are. It is a hint: what cannot be read is dropped, and requests fetch or compute it as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import BlockSource, ChainHead, Prefetch, WorkerRef
from mooncake.base.request import CacheHits
from mooncake.engine.block_pool import BlockPool
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
from mooncake.transfer.engine import Carried

Gathered = Callable[[list[int], float], None]
"""(the pages of the leading blocks, now). They are held for the callee. There are none when nothing
was fetched.
"""


@dataclass(frozen=True)
class Fetches:
    """The means by which a worker fetches blocks: the reader, the time limit, and who is told how
    each fetch ended.
    """

    reader: BlockReader
    """Reads into pages of this instance."""
    timeout_s: float
    ended: Callable[[WorkerRef, ReadResult], None]
    """Called with (pool node, how the fetch from it ended)."""


class PrefixReuse:
    """Gathers one prefix. It calls `gathered` exactly once, cancelled or not. A lost cache is a
    miss, never an error. Nothing writes to the pages any more when it ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        fetches: Fetches,
        keys: list[BlockKey],
        sources: list[BlockSource],
        gathered: Gathered,
        head_of: Callable[[list[BlockKey], int], ChainHead] = ChainHead,
    ) -> None:
        """`head_of`: (leading blocks, how many of them are counted) -> what pool nodes are told of
        them.
        """
        self._pool = pool
        self._fetches = fetches
        self._keys = keys
        self._sources = sorted(sources, key=lambda source: source.first)
        self._gathered = gathered
        self._head_of = head_of
        self._pages: list[int] = []
        self._fetched: dict[WorkerRef, CacheHits] = {}
        """Pool node -> the blocks that came from it, by the tier in which it had them."""
        self.carried = Carried()
        """What fetches have moved."""
        self.sources_asked: list[str] = []
        """The workers that were asked for blocks."""
        self._reported: dict[WorkerRef, int] = {}
        self._read: int | None = None
        """The number of the fetch under way."""
        self._cancelled = False

    def start(self, now: float) -> None:
        """Match own pages, then fetch. `gathered` may be called before this returns."""
        self._pages = list(self._pool.match(self._keys))
        self._pool.hold(self._pages)
        self._next(now)

    @property
    def num_fetched(self) -> int:
        """Number of blocks that came from other workers."""
        return sum(map(_num_blocks, self._fetched.values()))

    def num_counted(self, store: WorkerRef | None) -> int:
        """Return how many leading blocks the node has counted as used by this request."""
        return self._reported.get(store, 0) if store is not None else 0

    def fetched(self, store: WorkerRef | None) -> CacheHits | None:
        """Return how many blocks were fetched; `store` is this machine's node."""
        if not self._fetched:
            return None
        local = self._fetched.get(store, CacheHits()) if store is not None else CacheHits()
        return msgspec.structs.replace(local, peer=self.num_fetched - _num_blocks(local))

    def cancel(self, now: float) -> None:
        """Stop fetching. `gathered` is called as soon as nothing writes to the pages."""
        self._cancelled = True
        if self._read is not None:
            self._fetches.reader.cancel(self._read, now)

    def _next(self, now: float) -> None:
        """Fetch from the next source that adds blocks, or end."""
        while self._sources and not self._cancelled:
            source = self._sources.pop(0)
            have, stop = len(self._pages), min(source.stop, len(self._keys))
            if source.first > have or stop <= have:
                continue
            pages = self._pool.allocate(stop - have)
            if pages is None:
                break
            self._fetch(source, pages, have, now)
            return
        if not self._fetched:
            # The engine matches its own cache when the sequence's turn comes, and may find more.
            self._pool.release(self._pages)
            self._pages = []
        self._gathered(self._pages, now)

    def _fetch(self, source: BlockSource, pages: list[int], have: int, now: float) -> None:
        self.sources_asked.append(source.store.worker_id)
        self._read = self._fetches.reader.start(
            source.store,
            self._keys[have : have + len(pages)],
            pages,
            now + self._fetches.timeout_s,
            partial(self._on_fetched, source, pages, have),
            head=self._head_of(self._keys[:have], self.num_counted(source.store)),
        )

    def _on_fetched(
        self, source: BlockSource, pages: list[int], have: int, result: ReadResult, now: float
    ) -> None:
        self._read = None
        self._fetches.ended(source.store, result)
        num_blocks = result.num_blocks
        if num_blocks:
            self._reported[source.store] = have + num_blocks
            before = self._fetched.get(source.store, CacheHits())
            below = result.num_from_ssd + result.num_from_object
            self._fetched[source.store] = CacheHits(
                dram=before.dram + num_blocks - below,
                ssd=before.ssd + result.num_from_ssd,
                object=before.object + result.num_from_object,
            )
        for offset in range(num_blocks):
            self._pool.publish(self._keys[have + offset], pages[offset])
        self._pages.extend(pages[:num_blocks])
        self.carried.add(result.carried)
        if num_blocks < len(pages):
            self._pool.release(pages[num_blocks:])
            if source.others:
                self._sources.insert(0, _next_replica(source))
        self._next(now)


def _num_blocks(of_one_node: CacheHits) -> int:
    return of_one_node.dram + of_one_node.ssd + of_one_node.object


def _next_replica(source: BlockSource) -> BlockSource:
    """Return the same blocks from the next pool node that holds them."""
    return BlockSource(
        store=source.others[0], first=source.first, stop=source.stop, others=source.others[1:]
    )


MAX_RUNS = 256
"""More runs than this do not wait."""
PIECE_BYTES = 64 << 20
"""Bytes of a piece: a request that comes meanwhile shares the link with one piece at most."""


class ReadAhead:
    """Reads busy prefixes into free pages, piece by piece, in the order in which they were asked
    for. Owned by the instance.
    """

    def __init__(self, pool: BlockPool, fetches: Fetches, block_bytes: int) -> None:
        self._pool = pool
        self._fetches = fetches
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._runs: deque[Prefetch] = deque()
        """The runs that are not read whole; a piece of the first may be under way."""
        self._stop = 0
        """Where the current piece ends in its run."""
        self.num_blocks_read = 0

    def add(self, run: Prefetch) -> None:
        """Take a run to read. There is no answer."""
        if run.sources and len(self._runs) < MAX_RUNS:
            self._runs.append(run)

    def advance(self, now: float, *, leaving: bool) -> None:
        """Begin the next piece, unless blocks are being fetched. `leaving`: drop all runs."""
        if leaving:
            self._runs.clear()
        while self._runs and not self._fetches.reader.num_open:
            run = self._runs[0]
            have = len(self._pool.match(run.keys))
            self._stop = min(have + self._piece_blocks, len(run.keys))
            if self._pool.num_free - (self._stop - have) < self._pool.num_blocks // 2:
                self._runs.clear()
            elif self._stop == have:
                self._runs.popleft()
            else:
                self._begin(run, have, now)

    def _begin(self, run: Prefetch, have: int, now: float) -> None:
        def gathered(pages: list[int], _now: float) -> None:
            self._pool.release(pages)
            self.num_blocks_read += max(0, len(pages) - have)
            if len(pages) < self._stop and self._runs and self._runs[0] is run:
                self._runs.popleft()

        keys = run.keys[: self._stop]
        PrefixReuse(self._pool, self._fetches, keys, run.sources, gathered, _counted_before).start(
            now
        )


def _counted_before(keys: list[BlockKey], _num_counted: int) -> ChainHead:
    """Return the head of a chain with all its blocks as counted: a read ahead is no use of them."""
    return ChainHead(keys, len(keys))
