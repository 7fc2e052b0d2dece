"""One tier below DRAM, on disks or in a bucket: it decides what is written there and when, what is
loaded, and what is lost.

Pure; owned by the node's `Tiering`. It decides, and keeps its records in step with those of DRAM;
the `Disks` port moves the bytes. A bucket is a disk that other nodes use too, without a word to
this one.

The state of a block (one table of legal moves, `TRANSITIONS`):

    IDLE ──► DUE ──► WRITING ──► IDLE (stored) or DUE (refused: tried again)
      │                 └──────► WRITING_REMOVED ──► IDLE
      └────► LOADING ──► IDLE (in DRAM, or lost)
                └──────► LOADING_REMOVED ──► IDLE
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from mooncake.base import BlockKey, InternalError, Tier
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.storage.disk import (
    NO_SLOT,
    DiskBlock,
    DiskDone,
    Disks,
    DiskScanned,
    Outcome,
)
from mooncake.kvstore.storage.disk_tier import DiskTier
from mooncake.kvstore.storage.dram import DramTier
from mooncake.kvstore.storage.tombstones import COPY_S, Tombstones

MAX_OP_BYTES = 16 << 20
"""Largest size of an operation, which moves blocks that lie together on a disk."""

MAX_REFUSALS = 16
"""Groups of blocks without room on any disk that one call of `start_writes` skips."""

Report = Callable[[list[BlockKey], list[BlockKey], Tier], None]
"""(stored, removed, tier)"""
Loaded = Callable[[list[BlockKey], list[BlockKey], float], None]
"""(blocks that are in DRAM now, blocks that could not be loaded, now)"""


_LOST = {Outcome.CORRUPT: "blocks_corrupt", Outcome.ABSENT: "blocks_gone"}
"""What is counted when a block is not read for a reason other than an error."""


class State(Enum):
    """What is being done to move a block between DRAM and the tier."""

    IDLE = "idle"
    """Nothing is being done, wherever it is: such a block has no record here."""
    DUE = "due"
    """It is in DRAM, and waits for its turn to be written."""
    WRITING = "writing"
    LOADING = "loading"
    WRITING_REMOVED = "writing_removed"
    """Removed from the pool while it is being written: erased when the write ends."""
    LOADING_REMOVED = "loading_removed"
    """Removed from the pool while it is being loaded: erased when the read ends."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.DUE, State.LOADING}),
    State.DUE: frozenset({State.IDLE, State.WRITING}),
    State.WRITING: frozenset({State.IDLE, State.DUE, State.WRITING_REMOVED}),
    State.LOADING: frozenset({State.IDLE, State.LOADING_REMOVED}),
    State.WRITING_REMOVED: frozenset({State.IDLE}),
    State.LOADING_REMOVED: frozenset({State.IDLE}),
}
"""Legal moves of a block."""


class _Record:
    """A block that is due or being moved."""

    __slots__ = ("run", "state")

    def __init__(self) -> None:
        self.state = State.IDLE
        self.run: Sequence[BlockKey] = ()
        """Set for the last block of a run that is due: the run, all of which is stored once this
        block is.
        """


@dataclass(frozen=True, slots=True)
class _Write:
    """Blocks being written, which DRAM keeps meanwhile, and the blocks that they replace."""

    disk: int
    keys: list[BlockKey]
    overwritten: list[BlockKey]


@dataclass(frozen=True, slots=True)
class _Load:
    """Blocks being loaded, which their disk keeps meanwhile."""

    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class _Erase:
    disk: int
    slot: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class TierRules:
    """What one tier is, and what is written to it."""

    tier: Tier
    first_disk: int
    """The number of its first disk; the others follow."""
    min_uses: int
    """Blocks used this often are written."""
    write_at: float
    """Share of the DRAM blocks in use above which they are written."""
    max_tenant_bytes: int
    """Blocks of tenants with longer names are not written."""
    unwanted: Set[str] = frozenset()
    """Tenants that may have nothing here."""
    list_s: float | None = None
    """Seconds between two listings of a bucket; None: nobody else writes to these disks."""


class LowerTier:
    """Moves blocks of one node between DRAM and one tier below it.

    Blocks used at least `min_uses` times are written, those used longest ago first, once the share
    of DRAM in use exceeds `write_at`. Evicting them then loses nothing. A block that is evicted
    before its turn is lost. Blocks are loaded when a reader asks for them. A block that a disk
    returns damaged or not at all is forgotten, and its slot is erased. A block that a bucket does
    not return in time stays, and the bucket is not read for `ssd_retry_s`.
    """

    def __init__(
        self,
        rules: TierRules,
        places: DiskTier,
        config: KvStoreConfig,
        dram: DramTier,
        disks: Disks,
        tombstones: Tombstones,
        report: Report,
        loaded: Loaded,
        counters: Counter[str],
    ) -> None:
        self.rules = rules
        self.places = places
        self._config = config
        self._dram = dram
        self._disks = disks
        self._tombstones = tombstones
        self._report = report
        self._loaded = loaded
        self._counters = counters
        self._going: Counter[BlockKey] = Counter()
        """The copies of blocks given up that a disk is about to erase or overwrite."""
        self._stuck: set[BlockKey] = set()
        """Blocks given up of which a disk failed to erase or overwrite a copy."""
        self._records: dict[BlockKey, _Record] = {}
        self._due: OrderedDict[BlockKey, None] = OrderedDict()
        """The blocks that are DUE, used longest ago first."""
        self._moves: dict[int, _Write | _Load | _Erase] = {}
        """The operations under way, by their ids."""
        self._num_writing = 0
        self._num_loading = 0
        self.read_s = 0.0
        """The seconds in which blocks were being loaded, one or many at a time."""
        self._reading_since_s = 0.0
        """While blocks are being loaded: the time up to which `read_s` counts."""
        self._num_refused = 0
        """Number of due blocks in a row for which no disk had room."""
        self._rests_until_s = -math.inf
        """When a bucket that did not answer is read again."""
        self._rests = False
        self._list_at_s = math.inf
        """When a bucket is listed again; never while it is being listed."""
        self._listed_at_s = -math.inf
        """When the listing began that is under way, or was the last."""
        self._write_above = math.floor(dram.num_blocks * rules.write_at)
        queue_blocks = config.ssd_queue_bytes // dram.block_bytes
        self._max_writing = max(1, min(queue_blocks, dram.num_blocks // 8))
        self.max_loading = max(1, queue_blocks)
        """Number of blocks that may be loading at a time."""
        # Objects are moved one by one, side by side.
        self._op_blocks = 1 if self.is_shared else max(1, MAX_OP_BYTES // dram.block_bytes)

    @property
    def is_shared(self) -> bool:
        """True if the tier is a bucket, which other nodes may use too."""
        return self.rules.list_s is not None

    def _count(self, name: str, number: int = 1) -> None:
        self._counters[f"{self.rules.tier.value}_{name}"] += number

    # ------------------------------------------------------------------ states

    def state(self, key: BlockKey) -> State:
        """Return what is being done to move a block."""
        record = self._records.get(key)
        return State.IDLE if record is None else record.state

    def _move(self, key: BlockKey, state: State) -> _Record:
        """Put a block into another state and return its record (the last one if the state is IDLE).

        Raises:
            InternalError: the move is not one of `TRANSITIONS`.
        """
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record()
        old = record.state
        if state not in TRANSITIONS[old]:
            raise InternalError(f"block {key.hex()} cannot go from {old.value} to {state.value}")
        record.state = state
        if old is State.DUE:
            del self._due[key]
        if state is State.DUE:
            self._due[key] = None
        elif state is State.IDLE:
            del self._records[key]
        return record

    # ------------------------------------------------------------------ what happens in DRAM

    def used(self, uses: Mapping[BlockKey, int], run: Sequence[BlockKey]) -> None:
        """Mark the blocks of a run as due that have been used often enough. `uses`: those in DRAM
        whose uses have been counted just now, with their numbers.
        """
        last = None
        for key, number in uses.items():
            if number >= self.rules.min_uses and not self.places.is_known(key):
                last = self._records.get(key)
                if last is None:
                    last = self._move(key, State.DUE)
                self._due.move_to_end(key)
        if last is not None:
            last.run = run

    def evicted(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks that DRAM has given up. A write that has begun goes on until `remove`."""
        for key in keys:
            if key in self._due:
                self._count("blocks_too_late")
                self._move(key, State.IDLE)

    # ------------------------------------------------------------------ down

    def drain(self) -> None:
        """Write all blocks that are due, however much room DRAM has, because the node will end
        soon.
        """
        self._write_above = -1

    @property
    def drained(self) -> bool:
        """True if nothing is under way, and every block that was due has been written, or cannot
        be.
        """
        return self.quiet and self._num_refused >= len(self._due)

    def start_writes(self, now: float) -> None:
        """Begin to write what is due, as far as the disks keep up, and to list a bucket when its
        time has come.
        """
        self._rests = now < self._rests_until_s
        if now >= self._list_at_s:
            self._list_at_s, self._listed_at_s = math.inf, now
            self._disks.scan(self.rules.first_disk)
        dram, num_refusals = self._dram, 0
        while (
            self._due
            and num_refusals < MAX_REFUSALS
            and self._num_writing < self._max_writing
            and dram.num_blocks - dram.num_free > self._write_above
        ):
            room = min(self._op_blocks, self._max_writing - self._num_writing)
            due = [key for key, _ in zip(self._due, range(room), strict=False)]
            due = [key for key in due if not self._is_stale(key)]
            if not due:
                continue
            blocks = [(key, dram.block(key).tenant, dram.block(key).checksum) for key in due]
            keys, gone = self.places.reserve(blocks, now)
            self._count("blocks_evicted", len(gone))
            self._report([], gone, self.rules.tier)
            if not keys and not self.places.may_take(now):
                self._num_refused = len(self._due)
                return
            for key in keys:
                self._move(key, State.WRITING)
            for key in due:
                if key in self._due:
                    self._due.move_to_end(key)  # its tenant has no room: try others first
            self._num_refused = 0 if keys else self._num_refused + len(due)
            if not keys:
                num_refusals += 1
                continue
            dram.pin(keys)
            self._num_writing += len(keys)
            disk = self.places.block(keys[0]).disk
            if self.is_shared:
                gone = []  # their objects stay in the bucket
            self._going.update(gone)
            op_id = self._disks.write(self.rules.first_disk + disk, self._blocks(keys))
            self._moves[op_id] = _Write(disk, keys, gone)

    def _is_stale(self, key: BlockKey) -> bool:
        """Return whether a due block must not be written, and forget that it was due. A disk that
        was scanned late holds it, or its tenant may have nothing there, or the tenant's name is too
        long for a header.
        """
        tenant = self._dram.block(key).tenant
        is_long = len(tenant.encode()) > self.rules.max_tenant_bytes
        unwanted = tenant in self.rules.unwanted or is_long
        if unwanted or self.places.is_known(key):
            self._move(key, State.IDLE)
            return True
        return False

    def _write_ended(self, write: _Write, done: DiskDone, now: float) -> None:
        self._num_writing -= len(write.keys)
        self._dram.unpin(write.keys)
        stored: list[BlockKey] = []
        runs: list[Sequence[BlockKey]] = []
        retry_s = now + self._config.ssd_retry_s
        for key, outcome, checksum in zip(write.keys, done.outcomes, done.checksums, strict=True):
            if self.state(key) is State.WRITING_REMOVED:
                self.places.commit(key, checksum)  # it got this far
                self._erase(key)
                self._move(key, State.IDLE)
            elif outcome is Outcome.OK:
                self.places.commit(key, checksum)
                self._dram.learn_checksum(key, checksum)
                runs.append(self._move(key, State.IDLE).run)
                stored.append(key)
            else:
                self._move(key, State.DUE)
                if outcome is Outcome.FULL:
                    self._count("blocks_no_room")
                    self.places.no_room(key, retry_s)
                else:
                    if not self.is_shared:  # a bucket erases what is removed by its name
                        self._stuck.add(key)
                    self._count("write_errors")
                    self.places.abandon(key)
                    self.places.pause(write.disk, retry_s)
        for run in runs:
            # The disk's policy is told of the run as a whole: its tail goes before its head.
            self.places.touch(run)
        self._count("blocks_written", len(stored))
        self._report(stored, [], self.rules.tier)
        well = all(outcome is Outcome.OK for outcome in done.outcomes)
        for key in write.overwritten:
            self._end_trace(key, well=well)

    # ------------------------------------------------------------------ up

    def is_loading(self, key: BlockKey) -> bool:
        """Return whether a block is being loaded."""
        state = self.state(key)
        return state is State.LOADING or state is State.LOADING_REMOVED

    @property
    def num_loadable(self) -> int:
        """Number of further blocks that may be loading at a time."""
        return max(0, self.max_loading - self._num_loading)

    def can_load(self, key: BlockKey) -> bool:
        """Return whether a block lies here, and may be read now."""
        return self.places.has(key) and not self._rests

    def load(self, keys: Sequence[BlockKey], now: float) -> None:
        """Begin to load blocks that `can_load` into the memory that DRAM has reserved for them. The
        `Loaded` callback is told the result.
        """
        if not self._num_loading:
            self._reading_since_s = now
        for group in self._neighbours(keys):
            for key in group:
                self.places.hold(key)
                self._move(key, State.LOADING)
            self._num_loading += len(group)
            disk = self.rules.first_disk + self.places.block(group[0]).disk
            self._moves[self._disks.read(disk, self._blocks(group))] = _Load(group)

    def _load_ended(self, load: _Load, done: DiskDone, now: float) -> None:
        self._num_loading -= len(load.keys)
        self.read_s += now - self._reading_since_s
        self._reading_since_s = now
        self.places.release(load.keys)
        whole: list[BlockKey] = []
        lost: list[BlockKey] = []
        for key, outcome, checksum in zip(load.keys, done.outcomes, done.checksums, strict=True):
            is_removed = self.state(key) is State.LOADING_REMOVED
            self._move(key, State.IDLE)
            if outcome is Outcome.OK and not is_removed:
                self._dram.learn_checksum(key, checksum)
                whole.append(key)
                continue
            self._dram.abandon(key)
            lost.append(key)
            if not is_removed:
                self._count(_LOST.get(outcome, "read_errors"))
            if outcome is Outcome.LATER:
                self._rests_until_s, self._rests = now + self._config.ssd_retry_s, True
                if not is_removed:
                    continue
            # What a bucket does not hold is not erased: another node may be writing it again.
            self._drop(key, erase=is_removed or outcome is not Outcome.ABSENT)
        self._dram.commit(whole, source=self.rules.tier)
        self._count("blocks_read", len(whole))
        self._report(whole, [], Tier.DRAM)
        self._loaded(whole, lost, now)

    def _neighbours(self, keys: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        """Cut a run into pieces whose blocks lie one after another on one disk."""
        piece: list[BlockKey] = []
        for key in keys:
            if piece and len(piece) < self._op_blocks:
                last, block = self.places.block(piece[-1]), self.places.block(key)
                if (block.disk, block.slot) == (last.disk, last.slot + 1):
                    piece.append(key)
                    continue
            if piece:
                yield piece
            piece = [key]
        if piece:
            yield piece

    # ------------------------------------------------------------------ disks

    def on_scanned(self, event: DiskScanned, now: float) -> list[BlockKey]:
        """Record what an earlier boot left on a disk, or what a bucket holds. Blocks that may not
        stay are erased, so that the next boot does not find them either. Return those that were
        removed from the pool.
        """
        number, stale = event.disk - self.rules.first_disk, list[tuple[BlockKey, int]]()
        if self.rules.list_s is None:
            found, stale = self.places.open_disk(number, event.found)
            self._count("blocks_torn", event.num_dropped)
        else:
            found = self.places.adopt(number, event.found)
            self._count("list_errors", event.failed)
            if not event.more:
                wait_s = self._config.ssd_retry_s if event.failed else self.rules.list_s
                self._list_at_s = now + wait_s
        for key, slot in stale:
            self._erase_slot(number, slot, key)
        # What was removed before a listing may have been written again by another node since.
        since_s = self._listed_at_s - COPY_S
        removed = [key for key in found if self._tombstones.is_since(key, since_s)]
        for key in removed:
            self._erase(key)
        gone = set(removed)
        kept = [key for key in found if key not in gone]
        self._count("blocks_found", len(kept))
        self._report(kept, [], self.rules.tier)
        return removed

    def on_done(self, event: DiskDone, now: float) -> list[BlockKey]:
        """Finish an operation. Return the blocks that it moved, erased or overwrote: none when it
        is not of this tier.
        """
        match self._moves.pop(event.op_id, None):
            case _Write() as write:
                self._write_ended(write, event, now)
                return [*write.keys, *write.overwritten]
            case _Load() as load:
                self._load_ended(load, event, now)
                return load.keys
            case _Erase(disk, slot, key):
                well = event.outcomes == [Outcome.OK]
                if slot != NO_SLOT:
                    self.places.erased(disk, slot, well=well or self.is_shared)
                self._end_trace(key, well=well)
                if well and self.is_shared:
                    self._stuck.discard(key)  # erased by its name: no other trace is left
                return [key]
        return []

    def stores(self, key: BlockKey) -> bool:
        """Return whether readers can have a block from a disk."""
        return self.places.has(key) and self.state(key) is not State.LOADING_REMOVED

    def remove(self, key: BlockKey) -> bool:
        """Remove a block from its disk for good. A block that is being moved is removed when the
        move has ended. Return whether a disk holds it, or would have. Until `is_fading` is false,
        another boot may find the block.
        """
        if self._drop(key):
            return True
        if not self.places.is_known(key):
            if self.is_shared:  # it may hold blocks that this node does not know of
                self._erase_slot(0, NO_SLOT, key)
            return False
        if self.state(key) is State.WRITING:
            self._move(key, State.WRITING_REMOVED)
        elif self.state(key) is State.LOADING:
            self._move(key, State.LOADING_REMOVED)
        return True

    def is_fading(self, key: BlockKey) -> bool:
        """Return whether a disk still has a trace of a block that was given up, and will erase
        it.
        """
        removed = self.state(key) in (State.WRITING_REMOVED, State.LOADING_REMOVED)
        return removed or key in self._going

    def is_stuck(self, key: BlockKey) -> bool:
        """Return whether the next boot may find a block although nothing erases it any more."""
        return key in self._stuck

    def _end_trace(self, key: BlockKey, *, well: bool) -> None:
        """Forget one copy of a block. If the disk did not erase it `well`, the block stays
        stuck.
        """
        self._going[key] -= 1
        if not self._going[key]:
            del self._going[key]
        if not well:
            self._stuck.add(key)

    def _drop(self, key: BlockKey, *, erase: bool = True) -> bool:
        """Forget a block on a disk, and `erase` it there. Return False while it is not on a disk,
        or in use.
        """
        if not self.places.has(key) or self.is_loading(key):
            return False
        if erase:
            self._erase(key)
        else:
            self.places.erased(*self.places.condemn(key), well=True)
        self._report([], [key], self.rules.tier)
        return True

    def _erase(self, key: BlockKey) -> None:
        disk, slot = self.places.condemn(key)
        self._erase_slot(disk, slot, key)

    def _erase_slot(self, disk: int, slot: int, key: BlockKey) -> None:
        self._going[key] += 1
        op_id = self._disks.erase(self.rules.first_disk + disk, [DiskBlock(key, slot, 0)])
        self._moves[op_id] = _Erase(disk, slot, key)

    def _blocks(self, keys: Sequence[BlockKey]) -> list[DiskBlock]:
        offsets = self._dram.offsets(keys)
        blocks = [self.places.block(key) for key in keys]
        return [
            DiskBlock(key, block.slot, offset, block.tenant, block.checksum)
            for key, block, offset in zip(keys, blocks, offsets, strict=True)
        ]

    # ------------------------------------------------------------------ checks

    @property
    def quiet(self) -> bool:
        """True if no operation is under way."""
        return not self._moves

    def pins(self) -> Counter[BlockKey]:
        """Return the blocks that are pinned in DRAM while they are written (for checks)."""
        return Counter(key for key in self._moving(_Write))

    def loading(self) -> set[BlockKey]:
        """Return the blocks that are being filled in DRAM (for checks)."""
        return set(self._moving(_Load))

    def _moving(self, kind: type[_Write | _Load]) -> list[BlockKey]:
        moves = [move for move in self._moves.values() if isinstance(move, kind)]
        return [key for move in moves for key in move.keys]

    def check_integrity(self) -> None:
        """Raise AssertionError when a block's state contradicts tiers and operations."""
        self.places.check_integrity()
        writing, loading = self._moving(_Write), self._moving(_Load)
        assert (len(writing), len(loading)) == (self._num_writing, self._num_loading)
        states = {key: record.state for key, record in self._records.items()}
        for keys, some in (
            (self._due, (State.DUE,)),
            (writing, (State.WRITING, State.WRITING_REMOVED)),
            (loading, (State.LOADING, State.LOADING_REMOVED)),
        ):
            assert sorted(keys) == sorted(key for key, state in states.items() if state in some)
        in_dram = State.DUE, State.WRITING
        assert all(self._dram.has(key) == (state in in_dram) for key, state in states.items())
        going = Counter(move.key for move in self._moves.values() if isinstance(move, _Erase))
        for move in self._moves.values():
            going.update(move.overwritten if isinstance(move, _Write) else ())
        assert going == self._going
