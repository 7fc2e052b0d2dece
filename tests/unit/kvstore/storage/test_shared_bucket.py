"""Nodes with a bucket below their disks: what one writes, others read, and no trouble of the bucket
is more than a miss.
"""

from __future__ import annotations

import pytest

from mooncake.base import Tier
from mooncake.base.pool_messages import BlocksRemoved, RemoveBlocks
from mooncake.kvstore.storage.disk import NO_SLOT, DiskBlock, FoundBlock
from mooncake.sim.world.disk import SimBucket, SimMedium
from tests.support.kvstore.node_world import LAYOUT, NodeWorld, key, keys, worker

WRITER, READER = worker("prefill-0"), worker("prefill-1")


def world_of(bucket: SimBucket, num_blocks: int = 4, **settings) -> NodeWorld:
    world = NodeWorld(num_blocks, bucket=bucket, checksums=True, **settings)
    world.tick(0.1)
    return world


def fill(world: NodeWorld, run: list[bytes]) -> None:
    """Have other blocks evict those that are in DRAM."""
    world.put(WRITER, run)
    world.tick(world.now + 1.0)


def use_twice(world: NodeWorld, run: list[bytes], tenant: str = "") -> None:
    world.put(WRITER, run, tenant)
    pinned = world.pin(READER, run)
    world.unpin(READER, pinned)
    world.tick(world.now + 1.0)


def holds(world: NodeWorld, granted, wanted: list[bytes]) -> bool:
    places = zip(wanted, granted.places.offsets, strict=False)
    return all(world.holds(granted.places, offset, block) for block, offset in places)


@pytest.fixture
def bucket() -> SimBucket:
    return SimBucket()


def test_a_new_cluster_reads_what_another_wrote(bucket: SimBucket) -> None:
    first = world_of(bucket)
    use_twice(first, keys(1, 2))
    first.put(WRITER, keys(3))
    first.tick(first.now + 1.0)
    assert first.in_bucket == set(keys(1, 2)), "what was used once stays out"
    second = world_of(bucket)
    assert second.in_bucket == set(keys(1, 2))
    granted = second.pin_soon(READER, keys(1, 2, 3))
    assert (granted.num_blocks, granted.num_from_object, granted.num_from_ssd) == (2, 2, 0)
    assert holds(second, granted, keys(1, 2))
    second.unpin(READER, granted)
    assert second.pin(READER, keys(1, 2)).num_from_object == 0, "it is in DRAM now, and was read"
    assert second.node.state().num_objects_known == 2


def test_a_disk_is_read_before_the_bucket(bucket: SimBucket) -> None:
    world = world_of(bucket, media=[SimMedium()], ssd_write_at=0.0)
    use_twice(world, keys(1, 2))
    assert world.on_ssd == world.in_bucket == set(keys(1, 2))
    fill(world, keys(11, 12, 13, 14))
    granted = world.pin_soon(READER, keys(1, 2))
    assert (granted.num_from_ssd, granted.num_from_object) == (2, 0)


def test_a_run_comes_from_disk_and_bucket_together(bucket: SimBucket) -> None:
    world = world_of(bucket, num_blocks=8, media=[SimMedium()], ssd_blocks=2, ssd_write_at=0.0)
    use_twice(world, keys(1, 2, 3, 4))
    assert world.in_bucket == set(keys(1, 2, 3, 4))
    assert len(world.on_ssd) == 2
    fill(world, keys(*range(11, 19)))
    granted = world.pin_soon(READER, keys(1, 2, 3, 4))
    assert (granted.num_from_ssd, granted.num_from_object) == (2, 2)
    assert holds(world, granted, keys(1, 2, 3, 4))


def test_a_listing_finds_what_others_have_written_since(bucket: SimBucket) -> None:
    early = world_of(bucket, object_list_s=60.0)
    use_twice(world_of(bucket), keys(1))
    early.tick(59.0)
    assert early.in_bucket == set()
    early.tick(61.0)
    early.tick(62.0)
    assert early.in_bucket == set(keys(1))
    early.tick(130.0)
    early.tick(131.0)
    assert early.node.counters["object_blocks_found"] == 1, "it is not found again"


def test_a_listing_that_failed_is_repeated_soon(bucket: SimBucket) -> None:
    use_twice(world_of(bucket), keys(1))
    bucket.refuses_reads = True
    world = world_of(bucket, object_list_s=1000.0, ssd_retry_s=10.0)
    assert world.node.counters["object_list_errors"] == 1
    bucket.refuses_reads = False
    world.tick(11.0)
    world.tick(12.0)
    assert world.in_bucket == set(keys(1))


def test_a_bucket_that_does_not_answer_is_a_miss_and_loses_nothing(bucket: SimBucket) -> None:
    use_twice(world_of(bucket), keys(1, 2))
    world = world_of(bucket, ssd_retry_s=10.0)
    bucket.refuses_reads = True
    assert world.pin_soon(READER, keys(1, 2)).num_blocks == 0
    assert world.node.counters["object_read_errors"] == 2
    assert world.in_bucket == set(keys(1, 2)), "they may still be there"
    bucket.refuses_reads = False
    num_reads = world.node.counters["object_read_errors"]
    assert world.pin_soon(READER, keys(1, 2)).num_blocks == 0, "it is left alone for a while"
    assert world.node.counters["object_read_errors"] == num_reads
    world.tick(world.now + 10.0)
    assert world.pin_soon(READER, keys(1, 2)).num_blocks == 2


def test_a_slow_bucket_costs_a_reader_the_limit_and_no_more(bucket: SimBucket) -> None:
    use_twice(world_of(bucket), keys(1, 2))
    world = world_of(bucket, ssd_load_timeout_s=2.0)
    bucket.slowdown = 1e5  # 10 s
    granted = world.pin_soon(READER, keys(1, 2), 2.5)
    assert granted.num_blocks == 0
    world.tick(60.0)
    assert world.pin(READER, keys(1, 2)).num_blocks == 2, "they came later"


def test_a_bucket_that_takes_nothing_is_written_to_later(bucket: SimBucket) -> None:
    bucket.refuses_writes = True
    world = world_of(bucket, ssd_retry_s=10.0)
    use_twice(world, keys(1, 2))
    assert world.in_bucket == set()
    assert world.node.counters["object_write_errors"] == 1, "one tells enough"
    assert not any(map(world.node.blocks.tiering.is_stuck, keys(1, 2))), "nothing is kept of it"
    bucket.refuses_writes = False
    world.tick(world.now + 10.0)
    world.tick(world.now + 1.0)
    assert world.in_bucket == set(keys(1, 2))


def test_wrong_bytes_are_dropped_and_erased(bucket: SimBucket) -> None:
    use_twice(world_of(bucket), keys(1, 2))
    bucket.damage(key(2))
    world = world_of(bucket)
    granted = world.pin_soon(READER, keys(1, 2))
    assert granted.num_blocks == 1
    assert holds(world, granted, keys(1))
    assert world.node.counters["object_blocks_corrupt"] == 1
    assert set(bucket.slots) == world.in_bucket == set(keys(1))


def test_what_the_bucket_has_let_go_is_a_miss(
    bucket: SimBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_twice(world_of(bucket), keys(1))
    world = world_of(bucket)
    there = dict(bucket.slots)
    bucket.slots.clear()
    read, events = world.disks.read, list[str]()
    monkeypatch.setattr(world.disks, "erase", lambda *_: events.append("erase"))

    def read_and_write(disk: int, blocks: list[DiskBlock]) -> int:
        events.append("read")
        return read(disk, blocks)

    monkeypatch.setattr(world.disks, "read", read_and_write)
    assert world.pin_soon(READER, keys(1)).num_blocks == 0
    bucket.slots.update(there)
    world.tick(world.now + 1.0)
    assert events == ["read"], "what another node has written since is not erased"
    assert world.node.counters["object_blocks_gone"] == 1
    assert world.in_bucket == set()
    use_twice(world, keys(1))
    assert world.in_bucket == set(keys(1)), "its place is free again"


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_removed_block_is_erased_whether_it_was_listed_or_not(
    bucket: SimBucket, is_listed: bool
) -> None:
    early = world_of(bucket)
    use_twice(world_of(bucket), keys(1, 2))
    world = world_of(bucket) if is_listed else early
    before = len(world.channel.sent)
    world.handle(RemoveBlocks(asker=READER, ticket=1, keys=keys(1)))
    world.tick(world.now + 1.0)
    [removed] = [m for _, m in world.channel.sent[before:] if isinstance(m, BlocksRemoved)]
    assert removed.left == [False]
    assert set(bucket.slots) == set(keys(2))


def test_a_removal_is_not_done_while_the_bucket_refuses(bucket: SimBucket) -> None:
    world = world_of(bucket)
    use_twice(world, keys(1))
    bucket.refuses_writes = True
    before = len(world.channel.sent)
    world.handle(RemoveBlocks(asker=READER, ticket=1, keys=keys(1)))
    world.tick(world.now + 1.0)
    [removed] = [m for _, m in world.channel.sent[before:] if isinstance(m, BlocksRemoved)]
    assert removed.left == [True]
    bucket.refuses_writes = False
    world.handle(RemoveBlocks(asker=READER, ticket=2, keys=keys(1)))
    world.tick(world.now + 1.0)
    [removed] = [m for _, m in world.channel.sent if isinstance(m, BlocksRemoved) and m.ticket == 2]
    assert removed.left == [False]
    assert not bucket.slots


@pytest.mark.parametrize("seconds", [10.0, 60.0])
def test_a_late_listing_does_not_bring_back_what_was_removed(
    bucket: SimBucket, seconds: float
) -> None:
    world = world_of(bucket, object_list_s=seconds)
    use_twice(world, keys(1))
    bucket.late = [FoundBlock(key(1), NO_SLOT, "", None)]
    world.handle(RemoveBlocks(asker=READER, ticket=1, keys=keys(1)))
    world.tick(seconds + 1.0)
    world.tick(seconds + 2.0)
    assert bucket.num_listings == 2
    assert not bucket.slots
    if seconds == 10.0:
        assert world.in_bucket == set(), "it was removed a moment ago"
    assert world.pin_soon(READER, keys(1)).num_blocks == 0
    assert world.in_bucket == set()


def test_what_another_node_writes_again_after_a_removal_may_be_read(bucket: SimBucket) -> None:
    world = world_of(bucket, object_list_s=60.0)
    use_twice(world, keys(1))
    world.handle(RemoveBlocks(asker=READER, ticket=1, keys=keys(1)))
    world.tick(world.now + 1.0)
    use_twice(world_of(bucket), keys(1))
    world.tick(61.0)
    world.tick(62.0)
    assert world.in_bucket == set(keys(1))
    assert set(bucket.slots) == set(keys(1))


def test_a_full_index_forgets_blocks_and_the_bucket_keeps_them(bucket: SimBucket) -> None:
    world = world_of(bucket, bucket_blocks=2)
    use_twice(world, keys(1, 2))
    use_twice(world, keys(3))
    assert len(world.in_bucket) == 2
    assert set(bucket.slots) == set(keys(1, 2, 3))
    assert world_of(bucket, bucket_blocks=2).in_bucket == set(keys(2, 3)), "those written last"


def test_a_block_that_was_computed_anew_goes_to_dram_although_the_bucket_has_it(
    bucket: SimBucket,
) -> None:
    use_twice(world_of(bucket), keys(1))
    world = world_of(bucket)
    assert world.put(WRITER, keys(1)) == keys(1)
    assert world.inventory == set(keys(1))


def test_a_tenant_without_room_on_disks_has_nothing_in_the_bucket(bucket: SimBucket) -> None:
    world = world_of(bucket, tenant_ssd_quota_bytes={"alice": 0})
    use_twice(world, keys(1), "alice")
    use_twice(world, keys(2), "bob")
    assert set(bucket.slots) == set(keys(2))
    assert bucket.slots[key(2)].tenant == "bob"


def test_a_node_that_is_asked_says_where_a_block_lies(bucket: SimBucket) -> None:
    use_twice(world_of(bucket), keys(1))
    world = world_of(bucket)
    assert world.node.blocks.tiering.stored_in(key(1)) == [Tier.OBJECT]
    assert LAYOUT.block_bytes == 64
