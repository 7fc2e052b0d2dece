"""The longest prefix of a prompt that each worker holds: what placement asks for every request.

Pure; owned by the Conductor.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.index.directory import Directory, slots_of
from mooncake.kvstore.index.prefix_match import PrefixMatch

_MAX_FOLDED = 1 << 16


class PrefixIndex(Directory):
    """A `Directory` that finds longest prefixes; the tiers of one worker count together there."""

    def __init__(self) -> None:
        super().__init__()
        self._folded: dict[int, int] = {}
        """Masks of all tiers -> with those of a worker in one bit."""
        self._folded_for = -1

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it holds, for workers that hold the first.

        Longest first, then in slot order.
        """
        return {
            self.worker_at(slot).worker_id: length
            for length, mask in self.prefix_match(keys).runs(0, -1)
            for slot in slots_of(mask)
        }

    def prefix_match(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """Return which workers hold which stretch of a chain; good until the next block event."""
        return PrefixMatch(self, keys)

    def live_runs(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return (stop, workers) for runs of `keys` that the same workers hold, one bit each; 0 for
        blocks that no worker holds.
        """
        if self.has_tiered_workers:
            return [(stop, self._fold_live(mask)) for stop, mask in self.runs(keys)]
        live = self.live_mask
        return [(stop, mask & live) for stop, mask in self.runs(keys)]

    def num_replicas(self, key: BlockKey) -> int:
        """Return how many copies of `key` there are, over all workers and tiers."""
        return (self.mask(key) & self.live_mask).bit_count()

    def _fold_live(self, mask: int) -> int:
        """Return a mask with the tiers of a worker folded into one bit."""
        if self.generation != self._folded_for or len(self._folded) > _MAX_FOLDED:
            self._folded, self._folded_for = {}, self.generation
        folded = self._folded.get(mask)
        if folded is None:
            folded = 0
            for slot in slots_of(mask & self.live_mask):
                folded |= 1 << self.primary_slot(slot)
            self._folded[mask] = folded
        return folded
