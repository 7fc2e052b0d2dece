"""Blocks on SSD, story by story: down when asked for twice, up when wanted, whole or not at all."""

from __future__ import annotations

import pytest

from mooncake.base import AnyMessage, ConfigError, PeerLost, PinBlocks, PinGranted, Unpin, Welcome
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.eviction import POLICIES
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import BLOCK, GATEWAY, NodeWorld, key, keys, worker

WRITER, READER, OTHER = worker("prefill-0"), worker("decode-0"), worker("prefill-1")


def world_of(num_blocks: int = 4, disks: int = 1, **settings) -> NodeWorld:
    """A node whose disks are scanned, and which writes whatever it may at once."""
    settings = {"ssd_write_at": 0.0, "high_watermark": 1.0, **settings}
    world = NodeWorld(num_blocks, media=[SimMedium() for _ in range(disks)], **settings)
    world.tick(1.0)
    return world


def use_twice(world: NodeWorld, wanted: list[bytes]) -> None:
    world.put(WRITER, wanted)
    world.unpin(READER, world.pin(READER, wanted))
    world.tick(world.now + 1)


def holds(world: NodeWorld, granted: PinGranted, wanted: list[bytes]) -> bool:
    places = zip(wanted, granted.places.offsets, strict=False)
    return all(world.holds(granted.places, offset, block) for block, offset in places)


def asked(world: NodeWorld, message: PinBlocks) -> list[AnyMessage]:
    """Return what the reader is told at once."""
    return [answer for address, answer in world.handle(message) if address != GATEWAY.address]


def test_what_was_asked_for_twice_outlives_its_eviction() -> None:
    world = world_of(num_blocks=4)
    use_twice(world, keys(1, 2))
    assert world.on_ssd == set(keys(1, 2))
    world.put(WRITER, keys(11, 12, 13, 14))
    assert world.inventory == set(keys(11, 12, 13, 14))
    granted = world.pin_soon(READER, keys(1, 2, 3))
    assert granted.num_blocks == 2
    assert holds(world, granted, keys(1, 2))
    assert world.inventory >= set(keys(1, 2))
    assert world.node.counters["ssd_blocks_read"] == 2


def test_a_reader_is_told_what_came_up_for_it_until_someone_has_read_it() -> None:
    world = world_of(num_blocks=4)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12, 13, 14))
    first = world.pin_soon(READER, keys(1, 2))
    assert (first.num_blocks, first.num_from_ssd) == (2, 2)
    assert world.pin(OTHER, keys(1)).num_from_ssd == 1, "nobody has read it yet"
    world.unpin(READER, first)
    later = world.pin(READER, keys(1, 2))
    assert (later.num_blocks, later.num_from_ssd) == (2, 0)


def test_what_was_asked_for_once_does_not_go_down() -> None:
    world = world_of()
    world.put(WRITER, keys(1, 2))
    world.tick(5.0)
    assert world.on_ssd == set()
    generous = world_of(ssd_min_uses=1)
    generous.put(WRITER, keys(1, 2))
    generous.tick(5.0)
    assert generous.on_ssd == set(keys(1, 2))


def test_a_second_request_that_finds_all_its_blocks_stored_counts_as_a_use() -> None:
    world = world_of()
    world.put(WRITER, keys(1, 2))
    assert world.put(OTHER, keys(1, 2)) == []
    world.tick(5.0)
    assert world.on_ssd == set(keys(1, 2))


def test_nothing_goes_down_while_there_is_room() -> None:
    world = world_of(num_blocks=8, ssd_write_at=0.5)
    use_twice(world, keys(1, 2))
    assert world.on_ssd == set()
    world.put(WRITER, keys(3, 4, 5))
    world.tick(5.0)
    assert world.on_ssd == set(keys(1, 2))


def test_a_writer_need_not_write_what_a_disk_holds() -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1))
    world.put(WRITER, keys(11, 12))
    assert world.put(WRITER, keys(1, 13)) == keys(13)
    assert world.node.counters["blocks_refused"] == 0


def test_blocks_are_found_and_announced_again_after_a_restart() -> None:
    world = world_of(disks=2, num_blocks=8)
    use_twice(world, keys(1, 2))
    use_twice(world, keys(3, 4))
    assert all(medium.slots for medium in world.media), "both disks are used"
    world.boot()
    assert world.on_ssd == set()
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(1, 2, 3, 4))
    granted = world.pin_soon(READER, keys(1, 2, 3, 4))
    assert holds(world, granted, keys(1, 2, 3, 4))
    assert granted.num_blocks == 4
    assert world.node.counters["ssd_blocks_found"] == 4


def test_a_write_that_a_crash_cut_short_is_never_served() -> None:
    world = world_of(ssd_min_uses=1)
    world.put(WRITER, keys(1))
    world.node.tick(world.now)
    assert list(world.media[0].slots), "the write is under way"
    world.boot()
    world.tick(world.now + 1)
    assert world.on_ssd == {key(1)}, "nobody has looked at the bytes yet"
    assert world.pin_soon(READER, keys(1)).num_blocks == 0
    assert world.node.counters["ssd_blocks_corrupt"] == 1
    assert world.on_ssd == set()
    assert world.put(WRITER, keys(1)) == keys(1)


def test_a_damaged_block_is_a_miss_and_so_is_what_lies_behind_it() -> None:
    world = world_of(num_blocks=4)
    use_twice(world, keys(1, 2, 3))
    world.put(WRITER, keys(11, 12, 13, 14))
    world.media[0].damage(1)
    granted = world.pin_soon(READER, keys(1, 2, 3))
    assert granted.num_blocks == 1
    assert holds(world, granted, keys(1))
    assert world.on_ssd == set(keys(1, 3))
    assert world.inventory >= set(keys(1, 3)), "the tail came up and is good"
    world.boot()
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(1, 3)), "the slot was erased"


def test_a_disk_that_does_not_read_costs_the_blocks_it_held() -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12))
    world.media[0].refuses_reads = world.media[0].refuses_writes = True
    assert world.pin_soon(READER, keys(1, 2)).num_blocks == 0
    assert world.on_ssd == set()
    assert world.node.counters["ssd_read_errors"] == 2
    assert world.put(WRITER, keys(1, 2)) == keys(1, 2), "recomputed blocks are taken again"


@pytest.mark.parametrize("fault", ["is_full", "refuses_writes"])
def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(fault: str) -> None:
    world = world_of(ssd_retry_s=10.0)
    setattr(world.media[0], fault, True)
    use_twice(world, keys(1))
    name = "ssd_blocks_no_room" if fault == "is_full" else "ssd_write_errors"
    assert world.node.counters[name] == 1
    world.tick(world.now + 5)
    assert world.node.counters[name] == 1
    assert world.pin(READER, keys(1)).num_blocks == 1
    setattr(world.media[0], fault, False)
    world.tick(world.now + 6)
    world.tick(world.now + 1)
    assert world.on_ssd == {key(1)}


def test_the_other_disk_takes_what_one_refuses() -> None:
    world = world_of(disks=2, num_blocks=8)
    world.media[0].refuses_writes = True
    use_twice(world, keys(1))
    use_twice(world, keys(2))
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(1, 2))
    assert not world.media[0].slots


def test_a_file_system_with_less_room_than_the_limit_is_used_as_far_as_it_goes() -> None:
    """What is there is overwritten, and the rest is used when there is room for it."""
    world = world_of(num_blocks=8, ssd_blocks=8, ssd_retry_s=100.0)
    world.media[0].num_slots_with_room = 3
    for number in range(1, 7):
        use_twice(world, keys(number))
        world.tick(world.now + 1)
    assert world.on_ssd == set(keys(4, 5, 6))
    assert world.node.counters["ssd_blocks_no_room"] == 1, "asked once, not with every block"
    world.media[0].num_slots_with_room = None
    world.tick(world.now + 100)
    for number in range(11, 16):
        use_twice(world, keys(number))
        world.tick(world.now + 1)
    assert world.on_ssd == set(keys(4, 5, 6, 11, 12, 13, 14, 15))


def test_a_disk_that_cannot_even_overwrite_keeps_what_it_has() -> None:
    world = world_of(num_blocks=12, ssd_blocks=4, ssd_retry_s=10.0)
    for number in range(1, 5):
        use_twice(world, keys(number))
    world.media[0].is_full = True
    use_twice(world, keys(11))
    for _ in range(9):
        world.tick(world.now + 1)
    assert world.node.counters["ssd_blocks_no_room"] == 1
    assert world.on_ssd == set(keys(2, 3, 4)), "one block was lost by trying"


@pytest.mark.parametrize(
    ("policy", "queue_blocks"), [("lru", 1), *((name, 8) for name in sorted(POLICIES))]
)
def test_of_a_run_the_tail_goes_before_the_head(policy: str, queue_blocks: int) -> None:
    """Although nobody asks for it again, and it may go down in many operations."""
    queue_bytes = queue_blocks * BLOCK
    world = world_of(32, ssd_blocks=6, ssd_eviction=policy, ssd_queue_bytes=queue_bytes)
    use_twice(world, keys(1, 2, 3, 4))
    world.tick(world.now + 1)
    use_twice(world, keys(11, 12, 13))
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(1, 2, 3, 11, 12, 13))


def test_a_full_tier_evicts_what_was_used_longest_ago() -> None:
    world = world_of(num_blocks=8, ssd_blocks=2)
    for number in (1, 2, 3):
        use_twice(world, keys(number))
    assert world.on_ssd == set(keys(2, 3))
    assert world.node.counters["ssd_blocks_evicted"] == 1


def test_a_reader_is_not_kept_waiting_for_ever() -> None:
    world = world_of(num_blocks=4, ssd_load_timeout_s=0.5)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12, 13))
    assert world.inventory >= {key(1)}, "the tail was evicted, the head was not"
    world.disks.kill()  # a disk that hangs
    assert world.node.tick(world.now) is not None
    granted = world.pin_soon(READER, keys(1, 2), seconds=0.5)
    assert granted.num_blocks == 1


def test_a_wait_answers_once_however_often_it_is_asked() -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12))
    message = PinBlocks(reader=READER, ticket=77, keys=keys(1, 2))
    assert asked(world, message) == []
    assert asked(world, message) == []
    before = len(world.channel.sent)
    world.tick(world.now + 1)
    granted = [m for _, m in world.channel.sent[before:] if isinstance(m, PinGranted)]
    assert [grant.num_blocks for grant in granted] == [2]
    assert world.answer(message, PinGranted) == granted[0]


def test_two_readers_wait_for_one_load() -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12))
    world.handle(PinBlocks(reader=OTHER, ticket=50, keys=keys(1)))
    granted = world.pin_soon(READER, keys(1))
    assert granted.num_blocks == 1
    assert world.node.counters["ssd_blocks_read"] == 1
    world.unpin(READER, granted)
    assert world.put(WRITER, keys(21, 22)) == keys(21), "the other reader's pin still holds"


@pytest.mark.parametrize(
    "end", [PeerLost(worker=READER), Unpin(reader=READER, ticket=9)], ids=["lost", "unpinned"]
)
def test_a_reader_that_goes_while_it_waits_leaves_nothing(end: PeerLost | Unpin) -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1, 2))
    world.put(WRITER, keys(11, 12))
    assert asked(world, PinBlocks(reader=READER, ticket=9, keys=keys(1, 2))) == []
    assert world.node.num_open == 1
    world.handle(end)
    assert world.node.num_open == 0
    assert world.start(WRITER, keys(31, 32)).keys == [], "the disk still writes to that memory"
    world.tick(world.now + 1)
    assert world.put(WRITER, keys(21, 22)) == keys(21, 22)


def test_memory_that_is_being_written_down_is_not_reused() -> None:
    world = world_of(num_blocks=8, ssd_min_uses=1)
    world.put(WRITER, keys(*range(8)))
    world.node.tick(world.now)
    granted = world.put(WRITER, keys(*range(100, 108)))
    assert len(granted) == 7
    world.tick(world.now + 1)
    assert holds(world, world.pin_soon(READER, keys(0)), keys(0))


def test_a_snapshot_tells_of_both_tiers() -> None:
    world = world_of(num_blocks=2)
    use_twice(world, keys(1))
    world.put(WRITER, keys(11, 12))
    world.inventory.clear()
    world.on_ssd.clear()
    world.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
    assert world.inventory == set(keys(11, 12))
    assert world.on_ssd == {key(1)}


def test_settings_that_cannot_be_are_start_up_errors() -> None:
    ssd = SsdConfig(directory="/a", num_bytes=BLOCK)
    with pytest.raises(ConfigError, match="named twice"):
        KvStoreConfig(ssd=[ssd, ssd])
    with pytest.raises(ConfigError, match="a size above 0"):
        SsdConfig(directory="/a", num_bytes=0)
    with pytest.raises(ConfigError, match="ssd_eviction"):
        KvStoreConfig(ssd_eviction="fifo")
    with pytest.raises(ConfigError, match="ssd_write_at"):
        KvStoreConfig(ssd_write_at=1.5)
