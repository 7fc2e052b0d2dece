"""Prefetching: runs are promoted from SSD before their readers come, one run after the other, piece
by piece. They only take room that is free or held by blocks that are worth less.

Pure; owned by the node. Readers that wait already come first; `promotion` answers them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from mooncake.base import BlockKey
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.base.rights import client_key
from mooncake.kvstore.storage.promotion import Promotions, Settled
from mooncake.kvstore.storage.tiering import Tiering

MAX_RUNS = 256
"""Runs that may wait; further ones are ignored."""
MAX_CLIENT_RUNS = 16
"""The same limit for all pool clients that share a credential."""

Name = tuple[str, str, str, int]
"""(the key of a pool client, the reader's id, its epoch, ticket)"""


class Prefetcher:
    """All runs to prefetch on one node, in the order in which they were asked for."""

    def __init__(self, tiering: Tiering, promotions: Promotions, counters: Counter[str]) -> None:
        self._dram = tiering.dram
        self._promotions = promotions
        self._counters = counters
        self._runs: OrderedDict[Name, list[BlockKey]] = OrderedDict()
        """The rest of each run, after the current piece."""
        self._piece: tuple[str, int] | None = None
        """The name of the current promotion; there is one at a time."""
        self._num_pieces = 0

    def begin(self, message: Prefetch, now: float) -> None:
        """Promote a run as soon as those before it are done; this counts as a use of the run."""
        name = _name(message)
        client = name[0]
        may_wait = not client or sum(each[0] == client for each in self._runs) < MAX_CLIENT_RUNS
        if name not in self._runs and len(self._runs) < MAX_RUNS and may_wait:
            self._runs[name] = list(message.keys)
            self._go_on(now)

    def stop(self, message: StopPrefetch) -> None:
        """Promote no more of a run, because its reader will not come."""
        self._runs.pop(_name(message), None)

    def _go_on(self, now: float) -> None:
        while self._runs and self._piece is None:
            name, keys = next(iter(self._runs.items()))
            length = self._promotions.max_piece
            piece, rest = keys[:length], keys[length:]
            if rest:
                self._runs[name] = rest
            else:
                del self._runs[name]
            below = [key for key in piece if not self._dram.has(key)]
            self._num_pieces += 1
            self._piece = ("prefetch", self._num_pieces)
            settled = self._settled(name, piece, below)
            begun = self._promotions.begin(self._piece, piece, now, settled, gently=True)
            if begun is not None:
                self._piece = None
                self._end_piece(name, piece, below)

    def _settled(self, name: Name, piece: list[BlockKey], below: list[BlockKey]) -> Settled:
        def settled(now: float, _more: bool) -> None:
            self._piece = None
            self._end_piece(name, piece, below)
            self._go_on(now)

        return settled

    def _end_piece(self, name: Name, piece: list[BlockKey], below: list[BlockKey]) -> None:
        self._dram.use(piece)
        self._counters["blocks_prefetched"] += sum(map(self._dram.has, below))
        if not all(map(self._dram.has, piece)):
            self._runs.pop(name, None)  # no room: without this block the rest of the run is useless

    def check_integrity(self) -> None:
        """Raise AssertionError when runs wait for nothing."""
        assert len(self._runs) <= MAX_RUNS
        assert not self._runs or self._piece in self._promotions, "runs wait for nothing"


def _name(message: Prefetch | StopPrefetch) -> Name:
    reader = message.reader
    return client_key(reader), reader.worker_id, reader.epoch, message.ticket
