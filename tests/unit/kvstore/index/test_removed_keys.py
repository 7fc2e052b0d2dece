"""What is remembered of removed blocks: enough to name the last one, and no more than has room."""

from __future__ import annotations

from random import Random

from mooncake.base import BlockEvents, KeyChain, Tier, WorkerRef
from mooncake.base.blocks import KEY_BYTES
from mooncake.kvstore.index.holder_sets import RemovedKeys
from mooncake.kvstore.index.prefix_index import PrefixIndex


def chain(length: int, seed: int = 0) -> KeyChain:
    return KeyChain(Random(seed).randbytes(KEY_BYTES * length))


def test_it_names_the_end_of_what_was_removed() -> None:
    removed, keys = RemovedKeys(), chain(40)
    assert removed.end(keys) == 0
    removed.add(keys[2:4])
    removed.add(list(keys[26:27]))
    removed.add(())
    assert removed.end(keys) == 27
    assert removed.end(keys[:26]) == 4
    assert removed.end(keys, 3) == removed.end(keys, 26) == 27
    assert removed.end(keys, 27) == 27
    assert removed.end(keys[:0]) == 0
    assert removed.end(keys[4:]) == 0, "none of the first few was removed"


def test_a_key_of_zeros_is_found_only_once_it_was_removed() -> None:
    removed, zeros = RemovedKeys(), KeyChain(bytes(KEY_BYTES))
    removed.add(chain(1))
    assert removed.end(zeros) == 0
    removed.add(zeros)
    assert removed.end(zeros) == 1


def test_later_keys_displace_earlier_ones_and_memory_does_not_grow() -> None:
    removed, early, late = RemovedKeys(place_bits=4), chain(8), chain(500, seed=1)
    removed.add(early)
    removed.add(late)
    assert removed.end(early) == 0
    assert removed.end(late[490:]) == 10


def test_the_index_remembers_what_workers_removed() -> None:
    index, keys = PrefixIndex(), chain(4)
    worker = WorkerRef("kv", "e", "there")
    index.add_worker(worker, Tier.DRAM)
    index.apply(BlockEvents(worker=worker, tier=Tier.DRAM, sequence_no=1, stored=list(keys)))
    assert index.removed_end(keys, 0) == 0
    gone = list(keys[1:3])
    index.apply(BlockEvents(worker=worker, tier=Tier.DRAM, sequence_no=2, removed=gone))
    assert index.removed_end(keys, 1) == 3
