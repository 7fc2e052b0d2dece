"""Blocks on their way between DRAM and SSD: what goes down and when, what comes up, what is lost.

Pure; owned by the node. It decides and keeps the books of both tiers in step; the bytes are moved
by the `Disks` port. Who waits for a block that comes up is `promotion`'s business.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from mooncake.base import BlockKey, Tier
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.disk import DiskBlock, DiskDone, Disks, DiskScanned, Outcome
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.eviction import NONE, POLICIES, Keys
from mooncake.kvstore.removed import RemovalWatcher, Removed
from mooncake.kvstore.ssd import SsdTier

MAX_OP_BYTES = 16 << 20
"""Blocks that lie together on a disk are moved together, up to this."""

MAX_REFUSALS = 16
"""So many groups of blocks for which no disk has room are passed over at once."""

REUSED = 2
"""Uses, that of the writer included, that make a block worth more than one without."""

MAX_TENANT_CHARACTERS = 256
"""Blocks of tenants with longer names stay in DRAM."""

Announce = Callable[[Tier, list[BlockKey], list[BlockKey]], None]
"""(tier, stored, removed)"""
Loaded = Callable[[list[BlockKey], list[BlockKey], float], None]
"""(blocks that lie in DRAM now, blocks that do not and never will, now)"""


class _Move:
    """An operation under way; its blocks are held in DRAM (down) or on the disk (up)."""

    __slots__ = ("disk", "keys", "lost")

    def __init__(self, disk: int, keys: list[BlockKey], lost: Sequence[BlockKey] = ()) -> None:
        self.disk = disk
        self.keys = keys
        self.lost = lost
        """Blocks that are overwritten by it."""


class Tiering:
    """Moves blocks of one node between its two tiers.

    Down goes what has been asked for `ssd_min_uses` times, longest ago first, once more of the DRAM
    is in use than `ssd_write_at`; evicting it costs nothing then. What is evicted before its turn
    is lost. Up comes what a reader asks for. A block that a disk gives back wrong or not at all is
    forgotten and its slot erased.
    """

    def __init__(
        self,
        config: KvStoreConfig,
        dram: DramTier,
        disks: Disks,
        announce: Announce,
        loaded: Loaded,
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._dram = dram
        self._disks = disks
        self._announce = announce
        self._loaded = loaded
        self._counters = counters
        quotas = {t: size // dram.block_bytes for t, size in config.tenant_ssd_quota_bytes.items()}
        self.ssd = SsdTier(disks.num_slots, POLICIES[config.ssd_eviction], quotas)
        self._unwanted = {tenant for tenant, quota in quotas.items() if not quota}
        self._uses: dict[BlockKey, int] = {}
        self._candidates: OrderedDict[BlockKey, None] = OrderedDict()
        self._runs: dict[BlockKey, Sequence[BlockKey]] = {}
        """The last block of a run that is due -> the run: once it is down, all of it is."""
        self._writes: dict[int, _Move] = {}
        self._loads: dict[int, _Move] = {}
        self._erases: dict[int, tuple[int, int, BlockKey]] = {}
        self._fading: Counter[BlockKey] = Counter()
        """Traces of blocks on disks that are being erased or overwritten."""
        self._doomed: dict[BlockKey, None] = {}
        """On their way up or down, and removed meanwhile: forgotten at its end."""
        self._haunted: set[BlockKey] = set()
        """What a refused write or erasure may have left on a disk: the next boot may find it."""
        self.removed = Removed()
        self.watcher: RemovalWatcher | None = None
        self._loading: dict[BlockKey, None] = {}
        self._expected: dict[BlockKey, None] = {}
        """Brought up for readers to come, and not asked for since."""
        self._num_writing = 0
        self._num_refused = 0
        """Candidates in a row for which no disk had room."""
        self._write_above = math.floor(dram.num_blocks * config.ssd_write_at)
        queue_blocks = config.ssd_queue_bytes // dram.block_bytes
        self._max_writing = max(1, min(queue_blocks, dram.num_blocks // 8))
        self.max_loading = max(1, queue_blocks)
        """Blocks that may be on their way up."""
        self._op_blocks = max(1, MAX_OP_BYTES // dram.block_bytes)

    # ------------------------------------------------------------------ what DRAM does

    def used(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """A request wrote or asked for this run; of no interest but for blocks in DRAM. Of those
        `counted` it was known before.
        """
        for key in keys:
            self._expected.pop(key, None)
        here = [key for key in keys if key not in counted and self._dram.has(key)]
        self._used({key: self._uses.get(key, 0) + 1 for key in here}, keys)
        if self.ssd.num_slots:
            self.ssd.touch(keys, counted)

    def adopt(self, keys: Sequence[BlockKey]) -> None:
        """Take these blocks as asked for often enough to go down: they were, elsewhere."""
        least = max(self._config.ssd_min_uses, REUSED)
        self._used({key: max(self._uses.get(key, 0), least) for key in keys}, keys)

    def _used(self, uses: Mapping[BlockKey, int], run: Sequence[BlockKey]) -> None:
        """Blocks in DRAM have been asked for so often, together with others of a run."""
        self._uses |= uses
        if not self.ssd.num_slots:
            return
        least = self._config.ssd_min_uses
        due = [key for key, n in uses.items() if n >= least and not self.ssd.is_known(key)]
        for key in due:
            self._candidates[key] = None
            self._candidates.move_to_end(key)
        if due:
            self._runs[due[-1]] = run

    def is_reused(self, key: BlockKey) -> bool:
        """Whether a block has been asked for again since it was written, as far as is known."""
        went_down_for_it = self._config.ssd_min_uses >= REUSED and self.ssd.has(key)
        return self._uses.get(key, 0) >= REUSED or went_down_for_it

    def is_one_off(self, key: BlockKey) -> bool:
        """Whether nobody has asked for a block again, or is expected to: it may go for one that
        somebody has.
        """
        return not self.is_reused(key) and key not in self._expected

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """DRAM has given these up."""
        for key in keys:
            self._uses.pop(key, None)
            self._runs.pop(key, None)
            self._expected.pop(key, None)
            if self._candidates.pop(key, 0) is None:
                self._counters["ssd_blocks_too_late"] += 1

    # ------------------------------------------------------------------ down

    def drain(self) -> None:
        """Send down all that is due by its uses, whatever room DRAM has: it will be gone soon."""
        self._write_above = -1

    @property
    def drained(self) -> bool:
        """Whether nothing is under way, and what should have gone down has, or cannot."""
        return self.quiet and self._num_refused >= len(self._candidates)

    def start_writes(self, now: float) -> None:
        """Send down what is due, as far as the disks keep up."""
        dram, num_refusals = self._dram, 0
        while (
            self._candidates
            and num_refusals < MAX_REFUSALS
            and self._num_writing < self._max_writing
            and dram.num_blocks - dram.num_free > self._write_above
        ):
            room = min(self._op_blocks, self._max_writing - self._num_writing)
            wanted = [key for key, _ in zip(self._candidates, range(room), strict=False)]
            wanted = [key for key in wanted if not self._is_stale(key)]
            if not wanted:
                continue
            tenants = [(key, dram.tenant(key), dram.checksum(key)) for key in wanted]
            keys, gone = self.ssd.reserve(tenants, now)
            self._counters["ssd_blocks_evicted"] += len(gone)
            self._announce(Tier.SSD, [], gone)
            if not keys and not self.ssd.may_take(now):
                self._num_refused = len(self._candidates)
                return
            for key in keys:
                del self._candidates[key]
            for key in wanted:
                if key in self._candidates:
                    self._candidates.move_to_end(key)  # its tenant has no room: others first
            self._num_refused = 0 if keys else self._num_refused + len(wanted)
            if not keys:
                num_refusals += 1
                continue
            dram.hold(keys)
            self._num_writing += len(keys)
            disk = self.ssd.block(keys[0]).disk
            self._fading.update(gone)
            self._writes[self._disks.write(disk, self._blocks(keys))] = _Move(disk, keys, gone)

    def _is_stale(self, key: BlockKey) -> bool:
        """Drop a candidate that came to a disk by other ways (a disk scanned late holds it), or
        whose tenant may have nothing there or has a name too long for a header.
        """
        tenant = self._dram.tenant(key)
        unwanted = tenant in self._unwanted or len(tenant) > MAX_TENANT_CHARACTERS
        if unwanted or self.ssd.is_known(key):
            del self._candidates[key]
            self._runs.pop(key, None)
            return True
        return False

    def _write_ended(self, move: _Move, done: DiskDone, now: float) -> None:
        self._num_writing -= len(move.keys)
        self._dram.unpin(move.keys)
        stored: list[BlockKey] = []
        for key, outcome, checksum in zip(move.keys, done.outcomes, done.checksums, strict=True):
            if key in self._doomed:
                self.ssd.commit(key, checksum)  # as far as it got
                self._erase(key)
                continue
            if outcome is Outcome.OK:
                self.ssd.commit(key, checksum)
                self._dram.learn_checksum(key, checksum)
                stored.append(key)
                continue
            self._candidates[key] = None
            retry_s = now + self._config.ssd_retry_s
            if outcome is Outcome.FULL:
                self._haunted.update(move.lost)
                self._counters["ssd_blocks_no_room"] += 1
                self.ssd.no_room(key, retry_s)
            else:
                self._haunted.update((*move.lost, key))
                self._counters["ssd_write_errors"] += 1
                self.ssd.abandon(key)
                self.ssd.pause(move.disk, retry_s)
        for key in stored:
            # The disk's policy is told of the run as a whole: its tail goes before its head.
            self.ssd.touch(self._runs.pop(key, []))
        self._counters["ssd_blocks_written"] += len(stored)
        self._announce(Tier.SSD, stored, [])
        for key in move.lost:
            self._faded(key, all(outcome is Outcome.OK for outcome in done.outcomes))

    # ------------------------------------------------------------------ up

    def is_loading(self, key: BlockKey) -> bool:
        """Whether a block is on its way up."""
        return key in self._loading

    @property
    def num_loadable(self) -> int:
        """How many more blocks may be on their way up."""
        return max(0, self.max_loading - len(self._loading))

    def can_load(self, key: BlockKey) -> bool:
        """Whether a block can be brought up: on a disk, and DRAM knows nothing of it."""
        return self.ssd.has(key) and not self._dram.is_known(key)

    def load(
        self, keys: Sequence[BlockKey], *, gently: bool = False
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Bring up blocks of one run that `can_load`; how it ends is told through `Loaded`. Gently:
        into room that is free, or held by blocks that nobody asked for a second time.

        Returns (blocks that are on their way now, from the first on; keys evicted for them).
        """
        keys = keys[: self.num_loadable]
        if not keys:
            return [], []
        tenant, may_evict = self.ssd.block(keys[0]).tenant, self.is_one_off if gently else None
        granted, evicted = self._dram.reserve(keys, tenant, may_evict)
        for group in self._together(list(granted)):
            for key in group:
                self.ssd.hold(key)
                self._loading[key] = None
                if gently:
                    self._expected[key] = None
            disk = self.ssd.block(group[0]).disk
            self._loads[self._disks.read(disk, self._blocks(group))] = _Move(disk, group)
        return list(granted), evicted

    def _load_ended(self, move: _Move, done: DiskDone, now: float) -> None:
        whole: list[BlockKey] = []
        lost: list[BlockKey] = []
        self.ssd.release(move.keys)
        for key, outcome, checksum in zip(move.keys, done.outcomes, done.checksums, strict=True):
            del self._loading[key]
            if outcome is Outcome.OK and key not in self._doomed:
                self._dram.learn_checksum(key, checksum)
                whole.append(key)
                continue
            self._dram.abandon(key, None)
            self._expected.pop(key, None)
            lost.append(key)
            if key in self._doomed:
                self.drop(key)
                continue
            corrupt = outcome is Outcome.CORRUPT
            self._counters["ssd_blocks_corrupt" if corrupt else "ssd_read_errors"] += 1
            self.drop(key)
        self._dram.commit(whole)
        self._counters["ssd_blocks_read"] += len(whole)
        self._announce(Tier.DRAM, whole, [])
        self._loaded(whole, lost, now)

    def _together(self, keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
        """Cut a run into pieces whose blocks lie one behind the other on one disk."""
        piece: list[BlockKey] = []
        for key in keys:
            if piece and len(piece) < self._op_blocks:
                last, block = self.ssd.block(piece[-1]), self.ssd.block(key)
                if (block.disk, block.slot) == (last.disk, last.slot + 1):
                    piece.append(key)
                    continue
            if piece:
                yield piece
            piece = [key]
        if piece:
            yield piece

    # ------------------------------------------------------------------ disks

    def on_scanned(self, event: DiskScanned) -> None:
        """A disk tells what an earlier boot left there. What may not stay is erased, so that the
        next boot does not find it either.
        """
        found, stale = self.ssd.open_disk(event.disk, event.found)
        for key, slot in stale:
            self._erase_slot(event.disk, slot, key)
        unwanted = [key for key in found if key in self.removed]
        for key in unwanted:
            self._erase(key)
        kept = [key for key in found if key not in self.removed]
        self._counters["ssd_blocks_found"] += len(kept)
        self._counters["ssd_blocks_torn"] += event.num_dropped
        self._announce(Tier.SSD, kept, [])
        if self.watcher is not None:
            self.watcher.on_scanned(unwanted)

    @property
    def num_unscanned(self) -> int:
        """Disks of which it is not known what an earlier boot left there."""
        return self.ssd.num_closed

    def on_done(self, event: DiskDone, now: float) -> None:
        """An operation ended; those of others are ignored."""
        if (write := self._writes.pop(event.op_id, None)) is not None:
            self._write_ended(write, event, now)
        elif (load := self._loads.pop(event.op_id, None)) is not None:
            self._load_ended(load, event, now)
        elif (erase := self._erases.pop(event.op_id, None)) is not None:
            disk, slot, key = erase
            well = event.outcomes == [Outcome.OK]
            self.ssd.erased(disk, slot, well=well)
            if not well:
                self._haunted.add(key)
            self._faded(key, well)

    def can_drop(self, key: BlockKey) -> bool:
        """Whether a block is on a disk, and neither on its way up nor down."""
        return self.ssd.has(key) and key not in self._loading

    def drop(self, key: BlockKey) -> bool:
        """Forget a block on a disk, for this boot and the next ones; False while it is in use."""
        if not self.can_drop(key):
            return False
        self._erase(key)
        self._announce(Tier.SSD, [], [key])
        return True

    def remove(self, key: BlockKey) -> bool:
        """As `drop`, but for a block on its way too: that is forgotten when it has come to its end.
        While it `is_fading`, a boot after this one may find it.
        """
        if self.drop(key):
            return True
        if self.ssd.is_known(key):
            self._doomed[key] = None
            return True
        return False

    def may_come_back(self, key: BlockKey) -> bool:
        """Whether a disk that refused something may hold a trace of a block that is not known."""
        return key in self._haunted

    def is_fading(self, key: BlockKey) -> bool:
        """Whether a trace of a block that was given up is on a disk, and about to go."""
        return key in self._fading or key in self._doomed

    def stores(self, key: BlockKey) -> bool:
        """Whether a block can be had from a disk."""
        return self.ssd.has(key) and key not in self._doomed

    def _erase(self, key: BlockKey) -> None:
        disk, slot = self.ssd.condemn(key)
        self._erase_slot(disk, slot, key)
        self._doomed.pop(key, None)

    def _erase_slot(self, disk: int, slot: int, key: BlockKey) -> None:
        self._fading[key] += 1
        op_id = self._disks.erase(disk, [DiskBlock(key, slot, 0)])
        self._erases[op_id] = (disk, slot, key)

    def _faded(self, key: BlockKey, well: bool) -> None:
        self._fading[key] -= 1
        if not self._fading[key]:
            del self._fading[key]
        if self.watcher is not None:
            self.watcher.on_faded(key, well)

    def _blocks(self, keys: Sequence[BlockKey]) -> list[DiskBlock]:
        offsets = self._dram.offsets(keys)
        blocks = [self.ssd.block(key) for key in keys]
        return [
            DiskBlock(key, block.slot, offset, block.tenant, block.checksum)
            for key, block, offset in zip(keys, blocks, offsets, strict=True)
        ]

    # ------------------------------------------------------------------ checks

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        return not (self._writes or self._loads or self._erases)

    def held(self) -> Counter[BlockKey]:
        """Return what is held in DRAM while it is written down (for checks)."""
        return Counter(key for move in self._writes.values() for key in move.keys)

    def loading(self) -> set[BlockKey]:
        """Return what is being filled in DRAM (for checks)."""
        return set(self._loading)

    def check_integrity(self) -> None:
        """Raise AssertionError when the two tiers' books and the moves disagree."""
        self.ssd.check_integrity()
        assert self._num_writing == sum(len(move.keys) for move in self._writes.values())
        moving = [key for move in self._loads.values() for key in move.keys]
        assert sorted(moving) == sorted(self._loading)
        assert not any(self._dram.has(key) for key in moving)
        on_way = {*self._loading, *(key for move in self._writes.values() for key in move.keys)}
        assert self._doomed.keys() <= on_way
        fading = Counter(key for _, _, key in self._erases.values())
        fading.update(key for move in self._writes.values() for key in move.lost)
        assert fading == self._fading
        assert all(self._dram.has(key) for key in self._uses)
        assert all(key in self._uses for key in [*self._candidates, *self._runs])
        assert all(self._dram.is_known(key) for key in self._expected)
