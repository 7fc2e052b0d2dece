"""Prefix index: events in, longest prefixes out."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from mooncake.base import BlockEvents, Tier, WorkerRef, block_keys
from mooncake.kvstore.index.prefix_index import SWEEP_SETS, PrefixIndex, Replica, slots_of
from tests.support.kvstore.node_world import key, keys, worker

A, B, C = worker("kv-a"), worker("kv-b"), worker("kv-c")


def events(
    of: WorkerRef, number: int, stored=(), removed=(), *, snapshot=False, tier=Tier.DRAM
) -> BlockEvents:
    return BlockEvents(
        worker=of, tier=tier, sequence_no=number, stored=list(stored), removed=list(removed),
        snapshot=snapshot,
    )  # fmt: skip


def index_of(*known: WorkerRef) -> PrefixIndex:
    index = PrefixIndex()
    for each in known:
        index.add_worker(each, Tier.DRAM)
    return index


def holders(index: PrefixIndex, block: bytes) -> list[str]:
    """Return the ids of the workers that hold a block."""
    return list(dict.fromkeys(one.worker.worker_id for one in index.replicas(block)))


def test_each_worker_counts_as_far_as_it_holds_every_block() -> None:
    index = index_of(A, B, C)
    index.apply(events(A, 1, keys(1, 2, 3, 4)))
    index.apply(events(B, 1, keys(1, 2, 4)))
    index.apply(events(C, 1, keys(2, 3)))
    found = index.match(keys(1, 2, 3, 4, 5))
    assert found == {"kv-a": 4, "kv-b": 2}
    assert list(found) == ["kv-a", "kv-b"], "longest first"
    assert index.match(keys(9, 1)) == {}
    assert index.match([]) == {}
    assert PrefixIndex().match(keys(1)) == {}


def test_holders_and_replicas_of_a_key() -> None:
    index = index_of(A, B)
    index.apply(events(A, 1, keys(1)))
    index.apply(events(B, 1, keys(1, 2)))
    index.apply(events(B, 1, keys(1), tier=Tier.SSD))
    assert holders(index, key(1)) == ["kv-a", "kv-b"]
    assert index.replicas(key(1)) == [
        Replica(A, Tier.DRAM), Replica(B, Tier.DRAM), Replica(B, Tier.SSD)
    ]  # fmt: skip
    assert (len(index.replicas(key(1))), len(index.replicas(key(9)))) == (3, 0)
    assert index.num_keys == 2


def test_a_chain_may_run_through_the_tiers_of_a_worker() -> None:
    index = index_of(A, B)
    index.apply(events(A, 1, keys(1, 4)))
    index.apply(events(A, 1, keys(2, 3), tier=Tier.SSD))
    index.apply(events(B, 1, keys(1, 2)))
    assert index.match(keys(1, 2, 3, 4, 5)) == {"kv-a": 4, "kv-b": 2}
    index.apply(events(A, 2, removed=keys(3), tier=Tier.SSD))
    assert index.match(keys(1, 2, 3, 4, 5)) == {"kv-a": 2, "kv-b": 2}


def nearest(index: PrefixIndex, chain: list[bytes]) -> list[tuple[int, list[Replica | None]]]:
    """Return the runs of a chain with the worker and the tier that each holder stands for."""
    return [
        (stop, [index.owners[slot] for slot in slots_of(mask)])
        for stop, mask in index.live_runs(chain)
    ]


def test_a_holder_is_a_worker_with_the_nearest_tier_in_which_it_has_a_block() -> None:
    index = index_of(A, B)
    index.apply(events(A, 1, keys(2, 3, 4), tier=Tier.OBJECT))
    index.apply(events(A, 1, keys(1, 2)))
    index.apply(events(A, 1, keys(2, 3), tier=Tier.SSD))
    index.apply(events(B, 1, keys(1, 2, 3, 4)))
    held = [Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.OBJECT]
    slots = index.tier_slots("kv-a")
    assert list(slots) == [Tier.DRAM, Tier.OBJECT, Tier.SSD]
    found = dict(nearest(index, keys(1, 2, 3, 4)))
    for number, tier in enumerate(held):
        owners = next(owners for stop, owners in found.items() if number < stop)
        assert set(owners) == {Replica(A, tier), Replica(B, Tier.DRAM)}
    match = index.prefix_match(keys(1, 2, 3, 4))
    stops = [match.run_of(first, 1 << slots[tier]) for first, tier in enumerate(held)]
    assert stops == [2, 2, 3, 4]
    assert match.run_of(0, 1 << slots[Tier.SSD]) == 0, "DRAM is nearer"
    index.apply(events(A, 2, removed=keys(1, 2)))
    assert index.prefix_match(keys(2, 3)).run_of(0, 1 << slots[Tier.SSD]) == 2
    assert index.match(keys(2, 3, 4)) == {"kv-a": 3, "kv-b": 3}, "a worker counts with all tiers"


def test_nearest_tiers_follow_workers_that_change() -> None:
    """The same slots, another owner: what was remembered of them must not be used."""
    index = index_of(A)
    index.apply(events(A, 1, keys(1)))
    index.apply(events(A, 1, keys(2), tier=Tier.SSD))
    assert index.match(keys(1, 2)) == {"kv-a": 2}
    index.remove_worker("kv-a")
    index.apply(events(A, 1))
    for each in (B, C):
        index.add_worker(each, Tier.DRAM)
    index.apply(events(B, 1, keys(1)))
    index.apply(events(C, 1, keys(2)))
    index.apply(events(C, 1, keys(3), tier=Tier.SSD))
    assert index.match(keys(1, 2)) == {"kv-b": 1}
    assert index.match(keys(2, 3)) == {"kv-c": 2}


def test_a_gap_is_told_once_and_mended_by_a_snapshot() -> None:
    index = index_of(A)
    assert index.apply(events(A, 1, keys(1)))
    assert not index.apply(events(A, 3, keys(3), keys(1)))
    assert index.needs_snapshot("kv-a")
    assert index.apply(events(A, 4, keys(4)))
    assert index.needs_snapshot("kv-a")
    assert (holders(index, key(3)), holders(index, key(1))) == (["kv-a"], [])
    assert index.apply(events(A, 7, keys(1, 2), snapshot=True))
    assert not index.needs_snapshot("kv-a")
    assert index.match(keys(1, 2, 3)) == {"kv-a": 2}
    assert holders(index, key(3)) == []


def test_what_was_heard_before_is_not_heard_again() -> None:
    index = index_of(A)
    index.apply(events(A, 1, keys(1)))
    index.apply(events(A, 2, removed=keys(1)))
    assert index.apply(events(A, 1, keys(1)))
    assert index.apply(events(A, 2, keys(1), snapshot=True))
    assert index.num_keys == 0


def test_unknown_workers_and_old_epochs_are_not_believed() -> None:
    index = index_of(A)
    assert index.apply(events(B, 1, keys(1)))
    assert index.apply(events(worker("kv-a", "e0"), 1, keys(1)))
    assert index.num_keys == 0
    assert not index.needs_snapshot("kv-b")


def test_a_new_epoch_starts_with_nothing() -> None:
    index = index_of(A)
    index.apply(events(A, 1, keys(1)))
    index.apply(events(A, 3, keys(2)))
    reborn = worker("kv-a", "e2")
    index.add_worker(reborn, Tier.DRAM)
    assert index.match(keys(1)) == {}
    assert not index.needs_snapshot("kv-a")
    assert index.apply(events(reborn, 1, keys(2)))
    assert index.match(keys(2)) == {"kv-a": 1}


def test_adding_a_known_worker_again_keeps_what_it_holds() -> None:
    index = index_of(A)
    index.apply(events(A, 1, keys(1)))
    index.add_worker(A, Tier.DRAM)
    assert index.match(keys(1)) == {"kv-a": 1}
    assert index.apply(events(A, 2, keys(2)))


def test_a_lost_worker_counts_no_more_and_is_swept_away_by_later_reports() -> None:
    index = index_of(A, B)
    shared = block_keys("shared", range(3_000), 1)
    own = block_keys("own", range(2_000), 1)
    index.apply(events(A, 1, shared + own))
    index.apply(events(B, 1, shared))
    index.remove_worker("kv-a")
    assert index.match(own) == {}
    assert len(index.replicas(shared[0])) == 1
    index.apply(events(B, 2, own[:1]))
    index.check_integrity()
    assert index.num_keys == len(shared) + 1
    assert index.match(own) == {"kv-b": 1}


def test_sets_of_holders_are_swept_bit_by_bit() -> None:
    """More sets than are looked at in one go: a slot is nobody's until the last is done."""
    index = index_of(A, B, *(worker(f"kv-{number}") for number in range(12)))
    chain = block_keys("chain", range(2 * SWEEP_SETS), 1)
    index.apply(events(A, 1, chain))
    for bit in range(12):
        reporter = worker(f"kv-{bit}")
        index.apply(events(reporter, 1, [key for n, key in enumerate(chain) if n >> bit & 1]))
    slot = index.slot_of("kv-a")
    index.remove_worker("kv-a")
    index.apply(events(B, 1, chain[:3]))
    index.check_integrity()
    index.add_worker(C, Tier.DRAM)
    assert index.slot_of("kv-c") != slot, "not swept yet"
    index.apply(events(B, 2))
    index.check_integrity()
    index.add_worker(A, Tier.DRAM)
    assert index.slot_of("kv-a") == slot
    assert index.num_keys == len(chain)
    assert holders(index, chain[0]) == ["kv-b"]
    assert holders(index, chain[2]) == ["kv-b", "kv-1"]


def test_slots_are_used_again_only_when_no_key_knows_their_last_owner() -> None:
    directory = PrefixIndex()
    for boot in range(600):
        directory.add_worker(worker("kv-a", f"e{boot}"), Tier.DRAM)
        directory.apply(events(worker("kv-a", f"e{boot}"), 1, keys(1, 2)))
        directory.check_integrity()
        assert directory.mask(key(1)).bit_length() < 3, "masks do not grow for ever"
    assert len(directory.replicas(key(1))) == 1


def test_a_dead_slot_has_no_worker() -> None:
    directory = PrefixIndex()
    directory.add_worker(A, Tier.DRAM)
    assert directory.worker_at(0) == A
    directory.remove_worker("kv-a")
    directory.remove_worker("kv-a")
    with pytest.raises(KeyError):
        directory.worker_at(0)


def test_slots_of_a_mask() -> None:
    assert slots_of(0) == []
    assert slots_of(0b1011 | 1 << 999) == [0, 1, 3, 999]


@pytest.mark.parametrize("num_workers", [1, 16])
def test_few_keys_that_come_and_go_for_ever_take_no_memory(num_workers: int) -> None:
    """Nobody asks for anything meanwhile, as at a gateway without an API server."""
    chance, directory = Random(1), PrefixIndex()
    known = [worker(f"kv-{number}") for number in range(num_workers)]
    for one in known:
        directory.add_worker(one, Tier.DRAM)
    tracemalloc.start()
    try:
        for number in range(1, 1 + 12_000 // num_workers):
            for one in known:
                # Keys of other messages are other objects.
                come, go = [key(1)] * (chance.random() < 0.5), [key(2)]
                directory.apply(events(one, number, come, go if come else [*go, key(1)]))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    directory.check_integrity()
