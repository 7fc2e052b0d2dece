"""The longest prefix of a prompt that each worker holds: what placement asks for every request.

Pure; owned by the Conductor. It holds no state but a `Directory` and a cache of folded masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake.base import BlockEvents, BlockKey, Tier, WorkerRef
from mooncake.kvstore.directory import Directory, Replica, slots_of
from mooncake.kvstore.survey import Survey

_MAX_FOLDED = 1 << 16


class PrefixIndex:
    """Longest-prefix look-up over a `Directory`."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._folded: dict[int, int] = {}
        self._folded_for = -1

    @property
    def num_keys(self) -> int:
        """Distinct keys known (those of workers lost a moment ago included)."""
        return self._directory.num_keys

    def add_worker(self, worker: WorkerRef, tier: Tier) -> None:
        """Know `worker`, holding nothing yet. Another epoch of the same id is forgotten first."""
        self._directory.add_worker(worker, tier)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all it holds; unknown ids are ignored."""
        self._directory.remove_worker(worker_id)

    def apply(self, events: BlockEvents) -> bool:
        """Take in a worker's events; False = events were missed, ask it for a snapshot."""
        return self._directory.apply(events)

    def expect(self, worker: WorkerRef, numbers: Mapping[Tier, int]) -> None:
        """A worker has sent events up to these numbers, of each tier."""
        self._directory.expect(worker, numbers)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Whether a gap was seen and no snapshot has come since (to ask again)."""
        return self._directory.needs_snapshot(worker_id)

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it holds, for workers that hold the first.

        Tiers of one worker count together. Longest first, then in slot order.
        """
        return {
            self._directory.worker_at(slot).worker_id: length
            for length, mask in self.survey(keys).runs(0, -1)
            for slot in slots_of(mask)
        }

    def survey(self, keys: Sequence[BlockKey]) -> Survey:
        """Return who holds which stretch of a chain; good until the next event."""
        return Survey(self, keys)

    def live_runs(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return (stop, workers) for runs of `keys` that the same workers hold, one bit each; 0 for
        blocks that nobody holds.
        """
        cut = self._fold_live if self._directory.has_tiered_workers else self._cut_live
        return [(stop, cut(mask)) for stop, mask in self._directory.runs(keys)]

    @property
    def generation(self) -> int:
        """Changes whenever slots change hands."""
        return self._directory.generation

    @property
    def num_slots(self) -> int:
        """Masks have at most so many bits."""
        return self._directory.num_slots

    def slot_of(self, worker_id: str) -> int | None:
        """Return the bit of a worker in masks; None when it is not known."""
        return self._directory.first_slot(worker_id)

    def worker_at(self, slot: int) -> WorkerRef:
        """Return the worker a bit of a mask stands for."""
        return self._directory.worker_at(slot)

    def replicas(self, key: BlockKey) -> list[Replica]:
        """Return all copies of `key`."""
        return self._directory.replicas(key)

    def num_replicas(self, key: BlockKey) -> int:
        """Return how many copies of `key` there are, over all workers and tiers."""
        return (self._directory.mask(key) & self._directory.live_mask).bit_count()

    def holders(self, key: BlockKey) -> list[str]:
        """Return the ids of the workers that hold `key`, each once."""
        return list(dict.fromkeys(r.worker.worker_id for r in self.replicas(key)))

    def held_by(self, worker_id: str, tier: Tier) -> set[BlockKey]:
        """Return all keys that a worker is known to hold in a tier; slow (for checks)."""
        return self._directory.held_by(worker_id, tier)

    def check_integrity(self) -> None:
        """Raise AssertionError when the directory contradicts itself."""
        self._directory.check_integrity()

    def _cut_live(self, mask: int) -> int:
        return mask & self._directory.live_mask

    def _fold_live(self, mask: int) -> int:
        """Return a mask with the tiers of a worker folded into one bit."""
        directory = self._directory
        if directory.generation != self._folded_for or len(self._folded) > _MAX_FOLDED:
            self._folded, self._folded_for = {}, directory.generation
        known = self._folded.get(mask)
        if known is None:
            known = self._folded[mask] = self._fold(mask & directory.live_mask)
        return known

    def _fold(self, mask: int) -> int:
        result = 0
        for slot in slots_of(mask):
            result |= 1 << self._directory.primary_slot(slot)
        return result
