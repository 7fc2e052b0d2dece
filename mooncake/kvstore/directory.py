"""Which worker holds which block: key -> replicas, fed by numbered `BlockEvents`.

Pure and single-owner (the Conductor's). It is a hint: each worker stays the authority on its own
blocks. No messages are sent from here and no policy lives here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from mooncake.base import BlockEvents, BlockKey, Tier, WorkerRef

NUM_SHARDS = 256
"""Keys are spread by their first byte: no dict grows so big that one resize or sweep is felt."""

SWEEP_KEYS = 4_096
"""Keys looked at in one `apply` while there are lost workers to clear away: under a millisecond."""

WALK_KEYS = 16, 128
"""Looked up at a time when a chain is walked, which may end early: at first, and at most."""
_MAX_INTERNED = 1 << 16


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a block."""

    worker: WorkerRef
    tier: Tier


class _Stream:
    """What is known of one tier of one worker. Its holdings are the bits `1 << slot`."""

    __slots__ = ("needs_snapshot", "next_no", "slot", "tier", "worker")

    def __init__(self, worker: WorkerRef, tier: Tier, slot: int) -> None:
        self.worker = worker
        self.tier = tier
        self.slot = slot
        self.next_no = 1
        self.needs_snapshot = False


class Directory:
    """Holders of every key as one bitmask a key; bit `slot` stands for one tier of one worker.

    Losing a worker costs O(1): its bit counts no more from that moment, and the keys are swept of
    it bit by bit with each later `apply`. A slot is used again only after that. Equal masks are one
    object, so a key costs its own bytes and a dict entry.
    """

    def __init__(self) -> None:
        self._shards: list[dict[BlockKey, int]] = [{} for _ in range(NUM_SHARDS)]
        self._streams: dict[str, dict[Tier, _Stream]] = {}
        self._slots: list[_Stream | None] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._dead = 0
        self._sweeping = 0
        self._next_shard = 0
        self._unswept: list[BlockKey] = []
        self._interned: dict[int, int] = {}
        self.generation = 0
        """Changes whenever slots change hands: what was derived from slots is stale then."""

    # ------------------------------------------------------------------ workers

    def add_worker(self, worker: WorkerRef, tier: Tier) -> None:
        """Know `worker`; another epoch of the same id is forgotten first. Repeats do nothing."""
        tiers = self._streams.get(worker.worker_id)
        if tiers and next(iter(tiers.values())).worker.epoch != worker.epoch:
            self.remove_worker(worker.worker_id)
            tiers = None
        if tiers is None:
            tiers = self._streams[worker.worker_id] = {}
        if tier not in tiers:
            stream = _Stream(worker, tier, 0)
            self._open_slot(stream)
            tiers[tier] = stream

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all it holds; unknown ids are ignored."""
        for stream in self._streams.pop(worker_id, {}).values():
            self._close_slot(stream)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Whether events of this worker were missed and no snapshot has come since."""
        return any(s.needs_snapshot for s in self._streams.get(worker_id, {}).values())

    @property
    def has_tiered_workers(self) -> bool:
        """Whether some worker holds blocks in more than one tier (and so has several slots)."""
        return len(self._slots) - len(self._free_slots) - self._dead.bit_count() > len(
            self._streams
        )

    # ------------------------------------------------------------------ events

    def apply(self, events: BlockEvents) -> bool:
        """Take in what a worker reports; return False when events before it were missed.

        A gap is reported once; what did arrive is applied all the same, since a hint is better
        than none. Events of an unknown worker, of another epoch, or seen before are ignored. A key
        must not be in `stored` and `removed` of one message (`removed` is applied first).
        """
        self._sweep_some()
        tiers = self._streams.get(events.worker.worker_id)
        if not tiers or next(iter(tiers.values())).worker.epoch != events.worker.epoch:
            return True
        if events.tier not in tiers:
            self.add_worker(events.worker, events.tier)
        stream = tiers[events.tier]
        if events.sequence_no < stream.next_no:
            return True
        whole = events.snapshot or events.sequence_no == stream.next_no
        stream.next_no = events.sequence_no + 1
        if events.snapshot:
            self._close_slot(stream)
            self._open_slot(stream)
            stream.needs_snapshot = False
        elif not whole:
            stream.needs_snapshot = True
        self._discard(events.removed, stream.slot)
        self._insert(events.stored, stream.slot)
        return whole

    def _insert(self, keys: Sequence[BlockKey], slot: int) -> None:
        shards, interned = self._shards, self._interned
        bit = interned.setdefault(1 << slot, 1 << slot)
        for key in keys:
            shard = shards[key[0]]
            old = shard.setdefault(key, bit)
            if not old & bit:
                new = old | bit
                shard[key] = interned.setdefault(new, new)
        if len(interned) > _MAX_INTERNED:
            interned.clear()

    def _discard(self, keys: Sequence[BlockKey], slot: int) -> None:
        shards, interned = self._shards, self._interned
        bit = 1 << slot
        for key in keys:
            shard = shards[key[0]]
            old = shard.get(key, 0)
            if old == bit:
                del shard[key]
            elif old & bit:
                new = old & ~bit
                shard[key] = interned.setdefault(new, new)

    # ------------------------------------------------------------------ slots

    def _open_slot(self, stream: _Stream) -> None:
        if self._free_slots:
            stream.slot = heapq.heappop(self._free_slots)
            self._slots[stream.slot] = stream
        else:
            stream.slot = len(self._slots)
            self._slots.append(stream)
        self._live |= 1 << stream.slot
        self.generation += 1

    def _close_slot(self, stream: _Stream) -> None:
        self._slots[stream.slot] = None
        self._live &= ~(1 << stream.slot)
        self._dead |= 1 << stream.slot
        self.generation += 1

    def _sweep_some(self) -> None:
        """Clear bits of lost workers out of some more keys, if there are any.

        Keys stored meanwhile cannot have such bits, so a list of the shard as it was will do.
        """
        if not self._dead:
            return
        if not self._unswept:
            if self._next_shard == 0:
                self._sweeping = self._dead
            self._unswept = list(self._shards[self._next_shard])
            self._next_shard += 1
        dead, shard = self._sweeping, self._shards[self._next_shard - 1]
        for key in self._unswept[-SWEEP_KEYS:]:
            old = shard.get(key, 0)
            if old & dead:
                new = old & ~dead
                if new:
                    shard[key] = self._interned.setdefault(new, new)
                else:
                    del shard[key]
        del self._unswept[-SWEEP_KEYS:]
        if not self._unswept and self._next_shard == NUM_SHARDS:
            self._next_shard = self._sweeping = 0
            self._dead &= ~dead
            for slot in slots_of(dead):
                heapq.heappush(self._free_slots, slot)

    # ------------------------------------------------------------------ questions

    @property
    def num_keys(self) -> int:
        """Keys known, those of workers lost a moment ago included until they are swept."""
        return sum(map(len, self._shards))

    @property
    def num_slots(self) -> int:
        """Slots made so far: masks have at most so many bits."""
        return len(self._slots)

    @property
    def live_mask(self) -> int:
        """The bits of all workers known now."""
        return self._live

    def mask(self, key: BlockKey) -> int:
        """Return the slots that hold `key`, as bits; slots of lost workers may still be among them:
        cut with `live_mask`.
        """
        return self._shards[key[0]].get(key, 0)

    def masks(self, keys: Sequence[BlockKey], first: int = 0) -> Iterator[int]:
        """Return `mask(key)` of each key from the `first` on; the fast way to walk a chain."""
        return chain.from_iterable(self._chunks(keys, first))

    def _chunks(self, keys: Sequence[BlockKey], first: int) -> Iterator[list[int]]:
        shards = self._shards
        at, (count, most) = first, WALK_KEYS
        while at < len(keys):
            yield [shards[key[0]].get(key, 0) for key in keys[at : at + count]]
            at += count
            count = min(2 * count, most)

    def primary_slot(self, slot: int) -> int:
        """Return the slot that stands for the worker of a live `slot`: that of its first tier."""
        stream = self._slots[slot]
        if stream is None:
            raise KeyError(slot)
        return next(iter(self._streams[stream.worker.worker_id].values())).slot

    def first_slot(self, worker_id: str) -> int | None:
        """Return the slot that stands for a worker: that of its first tier; None if unknown."""
        tiers = self._streams.get(worker_id)
        return next(iter(tiers.values())).slot if tiers else None

    def worker_at(self, slot: int) -> WorkerRef:
        """Return the worker of a live slot."""
        stream = self._slots[slot]
        if stream is None:
            raise KeyError(slot)
        return stream.worker

    def replicas(self, key: BlockKey) -> list[Replica]:
        """Return all copies of `key` held by workers known now, in slot order."""
        found = (self._slots[slot] for slot in slots_of(self.mask(key) & self._live))
        return [Replica(stream.worker, stream.tier) for stream in found if stream is not None]

    def check_integrity(self) -> None:
        """Raise AssertionError when slots or masks contradict each other."""
        live = dead = 0
        for slot, stream in enumerate(self._slots):
            if stream is not None:
                assert stream.slot == slot
                assert self._streams[stream.worker.worker_id][stream.tier] is stream
                live |= 1 << slot
            elif slot not in self._free_slots:
                dead |= 1 << slot
        assert (live, dead) == (self._live, self._dead)
        assert live.bit_count() == sum(map(len, self._streams.values()))
        for number, shard in enumerate(self._shards):
            for key, mask in shard.items():
                assert key[0] == number
                assert mask > 0
                assert not mask & ~(live | dead), "a bit of a slot that is free"


def slots_of(mask: int) -> list[int]:
    """Return the positions of the bits set in `mask`, lowest first."""
    slots: list[int] = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
