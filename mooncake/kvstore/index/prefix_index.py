"""Knows which worker holds which block, and the longest prefix of a prompt that each holds. It maps
keys to replicas and is fed by numbered `BlockEvents`.

Pure; owned by the Conductor. It is a hint: each worker stays the authority on its own blocks. It
sends no messages and holds no policy. `PrefixIndex.prefix_match` tells which workers hold which
stretch of one chain, whose keys are looked up at once. It makes one match for each placement, which
is valid only until the next block event.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake.base import BlockEvents, BlockKey, Tier, WorkerRef
from mooncake.kvstore.index.holder_sets import HolderSets, RecentChanges, RemovedKeys
from mooncake.kvstore.index.key_buckets import Ints, Numbers
from mooncake.kvstore.index.key_table import KeyTable, words_of

LOOK_FIRST = 128
"""Keys looked up before the rest. For most new prompts no worker has even these."""
Runs = list[tuple[int, int]]
"""(stop, holders) for each run of keys with the same holders."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of blocks that each have a holder, cut where the holders change."""

    origin: int
    stops: tuple[int, ...]
    """Where each stretch ends (and the next begins)."""
    masks: tuple[int, ...]
    """The holders of each stretch."""

    @property
    def end(self) -> int:
        """The first block that no worker holds, or the end of the chain."""
        return self.stops[-1] if self.stops else self.origin

    def start(self, stretch: int) -> int:
        """Return the first block of a stretch."""
        return self.stops[stretch - 1] if stretch else self.origin


class PrefixMatch:
    """Looks up the holders of a chain, as far as they are needed."""

    def __init__(
        self, runs_of: Callable[[Sequence[BlockKey]], Runs], keys: Sequence[BlockKey]
    ) -> None:
        self._runs_of = runs_of
        self._keys = keys
        self._stops: list[int] = []
        self._masks: list[int] = []
        """The holders of the keys up to each stop, as far as they were looked up."""
        self._regions: list[Region] = []

    def region(self, first: int) -> Region:
        """Return the region with block `first`; an empty one if no worker holds it."""
        for region in self._regions:
            if region.origin <= first < region.end or first == region.origin:
                return region
        if any(region.end == first for region in self._regions):
            region = Region(first, (), ())  # no worker holds a region's end
        else:
            region = self._walk(first)
        self._regions.append(region)
        return region

    def runs(self, first: int, among: int) -> Iterator[tuple[int, int]]:
        """Yield (stop, holders) for the holders in the mask `among` that have the blocks
        [first, stop) and not the next; the longest run first.
        """
        region = self.region(first)
        if not region.stops:
            return
        stretch = bisect_right(region.stops, first)
        running, ended = region.masks[stretch] & among, []
        for number in range(stretch + 1, len(region.stops)):
            if not running:
                break
            held = running & region.masks[number]
            if held != running:
                ended.append((region.stops[number - 1], running ^ held))
                running = held
        if running:
            yield region.end, running
        yield from reversed(ended)

    def run_of(self, first: int, bits: int) -> int:
        """Return where the run ends that begins at `first` and that the holders in `bits` have
        together.
        """
        region = self.region(first)
        stop = first
        if region.stops:
            for number in range(bisect_right(region.stops, first), len(region.stops)):
                if not region.masks[number] & bits:
                    break
                stop = region.stops[number]
        return stop

    def looked_up(self) -> tuple[tuple[int, int], ...]:
        """Return (stop, holders) of all keys that were looked up so far, as `holders` does."""
        return tuple(zip(self._stops, self._masks, strict=True))

    def holders(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield (stop, holders) for runs of keys that have the same holders, up to the key with the
        number `count`; 0 for blocks that no worker holds.
        """
        self._look_up(count)
        for stop, mask in zip(self._stops, self._masks, strict=True):
            yield stop, mask
            if stop >= count:
                return

    def _walk(self, first: int) -> Region:
        stops: list[int] = []
        masks: list[int] = []
        self._look_up(first + 1)
        number = bisect_right(self._stops, first)
        while number < len(self._stops) and (mask := self._masks[number]):
            stop = self._stops[number]
            if masks and masks[-1] == mask:
                stops[-1] = stop
            else:
                stops.append(stop)
                masks.append(mask)
            self._look_up(stop + 1)
            number += 1
        return Region(first, tuple(stops), tuple(masks))

    def _look_up(self, count: int) -> None:
        """Look up the holders of the leading `count` keys, and of some more."""
        known = self._stops[-1] if self._stops else 0
        if known >= min(count, len(self._keys)):
            return
        stop = LOOK_FIRST if count <= LOOK_FIRST else len(self._keys)
        for end, mask in self._runs_of(self._keys[known:stop]):
            self._stops.append(known + end)
            self._masks.append(mask)


MOST_RECENT = 4_096
"""Keys (or kinds of changes) that may wait to be entered into the table. Entering them takes about
a millisecond.
"""
MANY_CHANGED = 256
"""If more changed keys than this are looked up, it is faster to enter all changes first."""

SWEEP_SETS = 2_048
"""Sets of holders that one `apply` clears of lost workers, in about a millisecond."""
_MAX_NEAREST = 1 << 16


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a block."""

    worker: WorkerRef
    tier: Tier


class _Stream:
    """The reports of one tier of one worker. Keys that it holds have the bit `1 << slot`."""

    __slots__ = ("needs_snapshot", "next_no", "slot", "tier", "worker")

    def __init__(self, worker: WorkerRef, tier: Tier, slot: int) -> None:
        self.worker = worker
        self.tier = tier
        self.slot = slot
        self.next_no = 1
        self.needs_snapshot = False


class PrefixIndex:
    """Keeps the holders of every key as one bitmask a key; bit `slot` stands for one tier of one
    worker.

    Losing a worker costs O(1): its bit is ignored from that moment, and each later `apply` removes
    it from some sets of holders. A slot is reused only after that.
    """

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._table = KeyTable(self._sets)
        """Keys -> numbers of their sets of holders, without recent changes."""
        self._recent = RecentChanges()
        self._removed = RemovedKeys()
        self._streams: dict[str, dict[Tier, _Stream]] = {}
        self._slots: list[_Stream | None] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._dead = 0
        self._sweeping = 0
        self.generation = 0
        """Changes whenever slots get other owners. What was derived from slots is then outdated."""
        self._nearest: dict[int, int] = {}
        """Masks of all tiers -> with the nearest tier of each worker alone."""
        self._nearest_for = -1
        self._owners: tuple[Replica | None, ...] = ()
        self._owners_for = -1

    # ------------------------------------------------------------------ workers

    def add_worker(self, worker: WorkerRef, tier: Tier) -> None:
        """Add a worker that holds nothing yet. Another epoch of it is forgotten. Repeats do
        nothing.
        """
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
        """Return whether events of this worker were missed and no snapshot has come since."""
        return any(s.needs_snapshot for s in self._streams.get(worker_id, {}).values())

    # ------------------------------------------------------------------ events

    def apply(self, events: BlockEvents) -> bool:
        """Apply what a worker reports. Return False when events before it were missed.

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
        bit = 1 << stream.slot
        self._recent.add(events.removed, 0, bit)
        self._removed.add(events.removed)
        self._recent.add(events.stored, bit, 0)
        if self._recent.size > MOST_RECENT:
            self._enter()
        return whole

    def expect(self, worker: WorkerRef, numbers: Mapping[Tier, int]) -> None:
        """Record how many events a worker has sent for each tier. Events that are missing were
        lost.
        """
        tiers = self._streams.get(worker.worker_id)
        if not tiers or next(iter(tiers.values())).worker.epoch != worker.epoch:
            return
        for tier, number in numbers.items():
            if tier not in tiers:
                self.add_worker(worker, tier)
            if number >= tiers[tier].next_no:
                tiers[tier].needs_snapshot = True

    def _enter(self) -> None:
        """Enter recent changes into the table."""
        words, changes = self._recent.take()
        meaning = self._recent.changes

        def change(which: Ints, numbers: Numbers) -> Numbers:
            return self._sets.change(numbers, changes[which], meaning)

        self._table.update(words, change)
        self._recent.forget()

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
        """Clear bits of lost workers from some more sets, if there are any."""
        if not self._dead:
            return
        if not self._sweeping:
            self._enter()  # a lost worker's reports, too
            self._sweeping = self._dead
            self._sets.begin_strip(self._dead)
        if self._sets.strip_some(SWEEP_SETS):
            self._dead &= ~self._sweeping
            for slot in slots_of(self._sweeping):
                heapq.heappush(self._free_slots, slot)
            self._sweeping = 0

    # ------------------------------------------------------------------ questions

    @property
    def num_keys(self) -> int:
        """Number of known keys. Keys of workers lost a moment ago are included until they are
        swept.
        """
        self._enter()
        return len(self._table) - self._sets.num_idle

    @property
    def num_slots(self) -> int:
        """Number of slots made so far: masks have at most this many bits."""
        return len(self._slots)

    def mask(self, key: BlockKey) -> int:
        """Return the slots that hold `key` as bits. Slots of lost workers may still be among
        them.
        """
        came, went = self._recent.changes[self._recent.get_one(key)]
        return (self._sets.masks[self._table.get_one(key)] | came) & ~went

    def runs(self, keys: Sequence[BlockKey]) -> Runs:
        """Return (stop, mask) for runs of `keys` that have the same holders: fast for chains."""
        words = words_of(keys)
        changed = self._recent.may_have(words)
        if len(changed) > MANY_CHANGED:
            self._enter()
            changed = changed[:0]
        codes = self._table.get(words).astype(np.int64)
        if len(changed):
            codes[changed] |= np.array(self._recent.get(words[changed])) << 32
        stops = np.append((codes[1:] != codes[:-1]).nonzero()[0] + 1, len(codes))
        masks, meaning = self._sets.masks, self._recent.changes
        found = []
        for stop, code in zip(stops.tolist(), codes[stops - 1].tolist(), strict=True):
            came, went = meaning[code >> 32]
            found.append((stop, (masks[code & 0xFFFFFFFF] | came) & ~went))
        return found

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it holds, for workers that hold the first.

        Longest first, then in slot order.
        """
        return {
            self.worker_at(slot).worker_id: length
            for length, mask in PrefixMatch(self._worker_runs, keys).runs(0, -1)
            for slot in slots_of(mask)
        }

    def prefix_match(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """Return which holders have which stretch of a chain, as `live_runs` does. It is valid
        until the next block event.
        """
        return PrefixMatch(self.live_runs, keys)

    def removed_end(self, keys: Sequence[BlockKey], first: int) -> int:
        """Return where a stretch of recently removed keys ends that begins at the key with the
        number `first`. Return `first` if none of the first few was removed. Workers may still hold
        such keys.
        """
        return self._removed.end(keys, first)

    def live_runs(self, keys: Sequence[BlockKey]) -> Runs:
        """Return (stop, holders) for runs of `keys` that have the same holders; 0 for blocks that
        no worker holds. Each worker has one bit: the slot of the nearest tier in which it has the
        block.
        """
        if self._has_tiers:
            return [(stop, self._nearest_of(mask)) for stop, mask in self.runs(keys)]
        live = self._live
        return [(stop, mask & live) for stop, mask in self.runs(keys)]

    def _worker_runs(self, keys: Sequence[BlockKey]) -> Runs:
        """Return the same, with the slot of a worker's first tier for every tier."""
        runs = self.live_runs(keys)
        return [(stop, self._workers_of(mask)) for stop, mask in runs] if self._has_tiers else runs

    @property
    def _has_tiers(self) -> bool:
        """Whether some worker reports several tiers."""
        num_used = len(self._slots) - len(self._free_slots) - self._dead.bit_count()
        return num_used > len(self._streams)

    def slot_of(self, worker_id: str) -> int | None:
        """Return the slot that stands for a worker: the slot of its first tier; None if unknown."""
        tiers = self._streams.get(worker_id)
        return next(iter(tiers.values())).slot if tiers else None

    def tier_slots(self, worker_id: str) -> dict[Tier, int]:
        """Return the slot of each tier that a worker has reported, the first one first."""
        return {tier: stream.slot for tier, stream in self._streams.get(worker_id, {}).items()}

    def worker_at(self, slot: int) -> WorkerRef:
        """Return the worker of a live slot."""
        stream = self._slots[slot]
        if stream is None:
            raise KeyError(slot)
        return stream.worker

    @property
    def owners(self) -> tuple[Replica | None, ...]:
        """The worker and the tier of each slot, or None if it has no live worker. The same object
        until slots change hands.
        """
        if self._owners_for != self.generation:
            self._owners_for = self.generation
            self._owners = tuple(
                None if stream is None else Replica(stream.worker, stream.tier)
                for stream in self._slots
            )
        return self._owners

    def replicas(self, key: BlockKey) -> list[Replica]:
        """Return all copies of `key` that known workers hold, in slot order."""
        found = (self._slots[slot] for slot in slots_of(self.mask(key) & self._live))
        return [Replica(stream.worker, stream.tier) for stream in found if stream is not None]

    def held_by(self, worker_id: str, tier: Tier) -> set[BlockKey]:
        """Return all keys that a worker holds in a tier; looks at every key (for checks)."""
        stream = self._streams.get(worker_id, {}).get(tier)
        if stream is None:
            return set()
        self._enter()
        bit = 1 << stream.slot
        return {key for key, number in self._table.items() if self._sets.masks[number] & bit}

    def _primary_slot(self, slot: int) -> int:
        """Return the slot that stands for the worker of a live `slot`: the slot of its first
        tier.
        """
        stream = self._slots[slot]
        if stream is None:
            raise KeyError(slot)
        return next(iter(self._streams[stream.worker.worker_id].values())).slot

    def _workers_of(self, mask: int) -> int:
        """Return a mask with the slots of the first tiers in place of all slots."""
        found = 0
        for slot in slots_of(mask):
            found |= 1 << self._primary_slot(slot)
        return found

    def _nearest_of(self, mask: int) -> int:
        """Return a mask without dead slots, and with the nearest tier of each worker alone."""
        if self.generation != self._nearest_for or len(self._nearest) > _MAX_NEAREST:
            self._nearest, self._nearest_for = {}, self.generation
        nearest = self._nearest.get(mask)
        if nearest is None:
            nearest = live = mask & self._live
            for slot in slots_of(live):
                stream = self._slots[slot]
                assert stream is not None, "a live slot of nobody"
                for tier, other in self._streams[stream.worker.worker_id].items():
                    if tier.nearness > stream.tier.nearness:
                        nearest &= ~(1 << other.slot)
            self._nearest[mask] = nearest
        return nearest

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
        assert not self._sweeping & ~self._dead
        numbers = Counter(self._table.check_integrity().tolist())
        self._sets.check_integrity(numbers)
        for number in numbers:
            mask = self._sets.masks[number]
            assert not mask & ~(live | dead), "a bit of a slot that is free"


def slots_of(mask: int) -> list[int]:
    """Return the positions of the bits set in `mask`, lowest first."""
    slots: list[int] = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
