"""Runs that are brought up from SSD for readers to come: one after the other, a part of what the
disks may have under way, and only where that pushes out nothing that is worth as much.

Pure; owned by the node. Readers that have come are `promotion`'s business and go before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from mooncake.base import BlockKey
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.promotion import Promotions, Settled
from mooncake.kvstore.tiering import Tiering

MAX_RUNS = 256
"""That may wait; of more, the new one is forgotten."""

Name = tuple[str, str, int]
"""(reader's id, its epoch, ticket)"""


class Prefetcher:
    """All such runs of one node, in the order they were asked for."""

    def __init__(
        self,
        tiers: tuple[DramTier, Tiering],
        promotions: Promotions,
        counters: Counter[str],
    ) -> None:
        self._dram, self._tiering = tiers
        self._promotions = promotions
        self._counters = counters
        self._runs: OrderedDict[Name, list[BlockKey]] = OrderedDict()
        """What is left of each run; of the first, a piece may be under way."""
        self._piece: tuple[str, int] | None = None
        """How the piece under way is waited for; there is one at a time."""
        self._num_pieces = 0

    def begin(self, message: Prefetch, now: float) -> None:
        """Bring up a run as soon as those before it are up; it counts as a use of the run."""
        name = _name(message)
        if name not in self._runs and len(self._runs) < MAX_RUNS:
            self._runs[name] = list(message.keys)
            self._go_on(now)

    def stop(self, message: StopPrefetch) -> None:
        """Its reader does not come: bring up no more of a run."""
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
            self._runs.pop(name, None)  # no room for it: its tail is worth nothing without this

    def check_integrity(self) -> None:
        """Raise AssertionError when runs wait for nothing."""
        assert len(self._runs) <= MAX_RUNS
        assert not self._runs or self._piece in self._promotions, "runs wait for nothing"


def _name(message: Prefetch | StopPrefetch) -> Name:
    return message.reader.worker_id, message.reader.epoch, message.ticket
