"""Read-ahead: reads prefixes that a gateway calls busy into free pages of this engine, before
requests ask for them.

Owned by the instance. Requests come first: a piece is begun only while none of them fetches, and
half of the pages stay as they are. It is a hint: what cannot be read is dropped, and requests fetch
or compute it as ever.
"""

from __future__ import annotations

from collections import deque

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import ChainHead, Prefetch
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.reuse import Fetches, PrefixReuse

MAX_RUNS = 256
"""More runs than this do not wait."""
PIECE_BYTES = 64 << 20
"""Bytes of a piece: a request that comes meanwhile shares the link with one piece at most."""


class ReadAhead:
    """Reads runs piece by piece, in the order in which they were asked for."""

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
