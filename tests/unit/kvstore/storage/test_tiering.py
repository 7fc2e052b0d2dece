"""One block between DRAM and SSD: each way down and up, lost and removed, and no illegal move."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from mooncake.base import BlockKey, InternalError, Tier, WorkerRef
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.storage.disk import DiskBlock, DiskDone, DiskScanned, FoundBlock, Outcome
from mooncake.kvstore.storage.dram import DramTier
from mooncake.kvstore.storage.lower_tier import TRANSITIONS, State
from mooncake.kvstore.storage.tiering import Tiering
from mooncake.transfer.engine import Region
from tests.support.kvstore.node_world import key, keys

BLOCK = 64
A, B = key(1), key(2)


class ManualDisks:
    """One disk; each operation waits until the test ends it."""

    can_hash = False

    def __init__(self, num_slots: int) -> None:
        self.num_slots = [num_slots]
        self.ops: dict[int, tuple[str, list[DiskBlock]]] = {}
        self._ids = count(1)

    def attach(self, arena: Region) -> None:
        raise NotImplementedError

    def scan(self, disk: int) -> None:
        raise NotImplementedError

    def write(self, disk: int, blocks: list[DiskBlock]) -> int:
        return self._begin("write", blocks)

    def read(self, disk: int, blocks: list[DiskBlock]) -> int:
        return self._begin("read", blocks)

    def erase(self, disk: int, blocks: list[DiskBlock]) -> int:
        return self._begin("erase", blocks)

    def checksum(self, offsets: list[int]) -> int:
        raise NotImplementedError

    def _begin(self, kind: str, blocks: list[DiskBlock]) -> int:
        op_id = next(self._ids)
        self.ops[op_id] = (kind, blocks)
        return op_id


class Tiers:
    """The tiering of a node of a few blocks, each of which is written after one use."""

    def __init__(self, num_blocks: int = 8, num_slots: int = 8, **settings) -> None:
        settings = {"ssd_min_uses": 1, "ssd_write_at": 0.0, "ssd_retry_s": 10.0, **settings}
        config = KvStoreConfig(dram_bytes=num_blocks * BLOCK, **settings)
        self.dram = DramTier(config, num_blocks, BLOCK)
        self.disks = ManualDisks(num_slots)
        self.counters: Counter[str] = Counter()
        self.reported: dict[Tier, set[BlockKey]] = {Tier.DRAM: set(), Tier.SSD: set()}
        self.loaded: list[tuple[list[BlockKey], list[BlockKey]]] = []
        self.tiering = Tiering(
            config, self.dram, self.disks, self._report,
            lambda whole, lost, now: self.loaded.append((whole, lost)), self.counters,
        )  # fmt: skip

    def _report(self, stored: list[BlockKey], removed: list[BlockKey], tier: Tier) -> None:
        self.reported[tier] = (self.reported[tier] | set(stored)) - set(removed)

    def scan(self, *found: FoundBlock) -> None:
        self.tiering.on_scanned(DiskScanned(disk=0, found=list(found)), 0.0)
        self.tiering.check_integrity()

    def put(self, *run: BlockKey, now: float = 0.0) -> None:
        """Store a run in DRAM, use it once, and begin to write it."""
        granted, _ = self.dram.reserve(run, "")
        self.dram.commit(list(granted))
        self.tiering.used(run)
        self.start(now)

    def start(self, now: float = 0.0) -> None:
        self.tiering.start_writes(now)
        self.tiering.check_integrity()

    def evict(self, *evicted: BlockKey) -> None:
        for block in evicted:
            assert self.dram.discard(block)
        self.tiering.evicted(evicted)
        self.tiering.check_integrity()

    def remove(self, block: BlockKey) -> bool:
        """Do what a node does to remove a block."""
        self.tiering.tombstones.add(block, WorkerRef("us", "e", "a"), 0.0)
        if self.dram.condemn(block):
            self.tiering.evicted([block])
        here = self.tiering.remove(block)
        self.tiering.check_integrity()
        return here

    def end(self, kind: str, outcome: Outcome = Outcome.OK, now: float = 0.0) -> list[BlockKey]:
        """End the one operation that is under way."""
        [(op_id, (begun, blocks))] = self.disks.ops.items()
        assert begun == kind
        del self.disks.ops[op_id]
        outcomes, checksums = [outcome] * len(blocks), [7] * len(blocks)
        self.tiering.on_done(DiskDone(op_id=op_id, outcomes=outcomes, checksums=checksums), now)
        self.tiering.check_integrity()
        return [block.key for block in blocks]

    def state(self, block: BlockKey = A) -> State:
        return self.tiering.lower[0].state(block)

    def on_disk_only(self, *run: BlockKey) -> None:
        """Write a run to the disk and evict it from DRAM."""
        self.scan()
        self.put(*run)
        assert self.end("write") == list(run)
        self.evict(*run)


def test_every_state_can_end_and_each_move_is_checked() -> None:
    assert set(TRANSITIONS) == set(State)
    for old in State:
        tiers = Tiers()
        if old is not State.IDLE:
            assert State.IDLE in TRANSITIONS[old]
        path = {State.DUE: [State.DUE], State.LOADING: [State.LOADING]}
        path[State.WRITING] = [State.DUE, State.WRITING]
        path[State.WRITING_REMOVED] = [*path[State.WRITING], State.WRITING_REMOVED]
        path[State.LOADING_REMOVED] = [State.LOADING, State.LOADING_REMOVED]
        for step in path.get(old, []):
            tiers.tiering.lower[0]._move(A, step)
        assert tiers.state() is old
        for new in set(State) - TRANSITIONS[old]:
            with pytest.raises(InternalError, match=f"from {old.value} to {new.value}"):
                tiers.tiering.lower[0]._move(A, new)


def test_down_and_up_again() -> None:
    tiers = Tiers(num_blocks=16)
    tiers.scan()
    tiers.put(A, B)
    assert tiers.state() is State.WRITING
    assert not tiers.tiering.stored_in(A)
    assert tiers.end("write") == [A, B]
    assert tiers.state() is State.IDLE
    assert tiers.reported[Tier.SSD] == {A, B}
    assert tiers.dram.block(A).checksum == 7
    tiers.evict(A, B)
    assert tiers.tiering.load([A, B], 0.0) == ([A, B], [])
    assert tiers.state() is State.LOADING
    assert tiers.tiering.is_loading(A)
    assert not tiers.tiering.can_load(A)
    assert tiers.end("read") == [A, B]
    assert tiers.loaded == [([A, B], [])]
    assert tiers.reported[Tier.DRAM] == {A, B}
    assert tiers.tiering.quiet
    assert tiers.counters["ssd_blocks_read"] == 2


def test_a_block_waits_until_its_disk_is_scanned_and_may_be_evicted_too_early() -> None:
    tiers = Tiers()
    tiers.put(A, B)
    assert (tiers.state(), tiers.disks.ops) == (State.DUE, {})
    tiers.evict(A)
    assert tiers.state() is State.IDLE
    assert tiers.counters["ssd_blocks_too_late"] == 1
    tiers.scan(FoundBlock(B, 3, "", 7))
    tiers.start()
    assert tiers.state(B) is State.IDLE, "a disk had it all the time"
    assert tiers.tiering.drained


@pytest.mark.parametrize("outcome", [Outcome.FULL, Outcome.FAILED])
def test_a_refused_write_is_tried_again(outcome: Outcome) -> None:
    tiers = Tiers()
    tiers.scan()
    tiers.put(A)
    tiers.end("write", outcome)
    assert tiers.state() is State.DUE
    assert tiers.tiering.is_stuck(A) is (outcome is Outcome.FAILED)
    tiers.start(now=10.0)
    assert tiers.end("write") == [A]
    assert tiers.reported[Tier.SSD] == {A}


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED])
def test_a_block_that_a_disk_returns_wrong_is_lost_and_erased(outcome: Outcome) -> None:
    tiers = Tiers()
    tiers.on_disk_only(A)
    tiers.tiering.load([A], 0.0)
    tiers.end("read", outcome)
    assert tiers.loaded == [([], [A])]
    assert tiers.state() is State.IDLE
    assert not tiers.dram.is_known(A)
    assert tiers.reported[Tier.SSD] == set()
    assert tiers.tiering.is_fading(A)
    assert tiers.end("erase") == [A]
    assert not tiers.tiering.is_fading(A)
    assert tiers.counters["ssd_blocks_corrupt"] + tiers.counters["ssd_read_errors"] == 1


@pytest.mark.parametrize("well", [True, False])
def test_a_block_on_a_disk_is_removed_once_it_is_erased(well: bool) -> None:
    tiers = Tiers()
    tiers.on_disk_only(A)
    assert tiers.remove(A)
    assert not tiers.remove(A)
    assert tiers.tiering.is_fading(A)
    tiers.end("erase", Outcome.OK if well else Outcome.FAILED)
    assert not tiers.tiering.is_fading(A)
    assert tiers.tiering.is_stuck(A) is not well


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED])
def test_a_block_removed_on_its_way_down_is_erased_however_the_write_ends(outcome: Outcome) -> None:
    tiers = Tiers()
    tiers.scan()
    tiers.put(A)
    assert tiers.remove(A)
    assert tiers.remove(A), "it is still on its way"
    assert tiers.state() is State.WRITING_REMOVED
    assert tiers.tiering.is_fading(A)
    tiers.end("write", outcome)
    assert tiers.state() is State.IDLE
    assert tiers.dram.num_free == 8
    assert tiers.reported[Tier.SSD] == set()
    tiers.end("erase")
    assert not tiers.tiering.is_fading(A)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CORRUPT])
def test_a_block_removed_on_its_way_up_is_lost_and_erased(outcome: Outcome) -> None:
    tiers = Tiers()
    tiers.on_disk_only(A)
    tiers.tiering.load([A], 0.0)
    assert tiers.remove(A)
    assert tiers.state() is State.LOADING_REMOVED
    assert tiers.tiering.is_loading(A), "readers wait for it until then"
    assert not tiers.tiering.stored_in(A)
    tiers.end("read", outcome)
    assert tiers.loaded == [([], [A])]
    assert tiers.dram.num_free == 8
    assert tiers.end("erase") == [A]
    assert tiers.tiering.quiet


def test_a_removed_block_found_by_a_late_scan_is_erased() -> None:
    tiers = Tiers()
    assert not tiers.remove(A)
    tiers.scan(FoundBlock(A, 0, "", 7), FoundBlock(B, 1, "", 7))
    assert tiers.reported[Tier.SSD] == {B}
    assert tiers.end("erase") == [A]


@pytest.mark.parametrize("well", [True, False])
def test_what_is_overwritten_leaves_no_trace_unless_the_write_is_refused(well: bool) -> None:
    tiers = Tiers(num_slots=1)
    tiers.on_disk_only(A)
    tiers.put(B)
    assert tiers.reported[Tier.SSD] == set()
    assert tiers.tiering.is_fading(A)
    tiers.end("write", Outcome.OK if well else Outcome.FAILED)
    assert not tiers.tiering.is_fading(A)
    assert tiers.tiering.is_stuck(A) is not well


def test_loading_gently_evicts_only_what_no_one_asked_for_again() -> None:
    tiers = Tiers(num_blocks=1, ssd_min_uses=2, high_watermark=1.0)
    tiers.scan(FoundBlock(A, 0, "", 7))
    tiers.put(B)
    tiers.tiering.used([B])
    assert tiers.tiering.is_reused(B)
    assert tiers.tiering.load([A], 0.0, gently=True) == ([], [])
    tiers.evict(B)
    assert tiers.tiering.load([A], 0.0, gently=True) == ([A], [])
    tiers.end("read")
    assert not tiers.tiering.is_one_off(A), "its reader is still to come"


def test_the_time_of_reads_counts_once_however_many_are_under_way() -> None:
    tiers = Tiers()
    tiers.scan(*(FoundBlock(block, 3 * slot, "", 7) for slot, block in enumerate(keys(1, 2, 3))))
    for block, begun_s in zip(keys(1, 2), (10.0, 12.0), strict=True):
        tiers.tiering.load([block], begun_s)
    for op_id, ended_s in zip(list(tiers.disks.ops), (13.0, 14.5), strict=True):
        del tiers.disks.ops[op_id]
        done = DiskDone(op_id=op_id, outcomes=[Outcome.OK], checksums=[7])
        tiers.tiering.on_done(done, ended_s)
    tiers.tiering.load(keys(3), 20.0)
    tiers.end("read", now=21.0)
    assert tiers.tiering.read_seconds == {"ssd_read_seconds": 5.5}
    assert tiers.counters["ssd_blocks_read"] == 3


def test_how_much_may_be_on_its_way_is_bounded() -> None:
    tiers = Tiers(num_blocks=8, ssd_queue_bytes=2 * BLOCK)
    run = keys(1, 2, 3, 4)
    tiers.scan(*(FoundBlock(block, slot, "", 7) for slot, block in enumerate(run)))
    assert tiers.tiering.load(run, 0.0) == (run[:2], [])
    assert tiers.tiering.loadable(run[2:]) == []
    assert tiers.tiering.load(run[2:], 0.0) == ([], [])
    tiers.end("read")
    assert tiers.tiering.loadable(run[2:]) == run[2:]
    tiers.put(*keys(11, 12))
    [(_, written)] = tiers.disks.ops.values()
    assert len(written) == 1, "an eighth of the DRAM"
