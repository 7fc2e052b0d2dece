"""Checksums of blocks: taken once, promised to readers, taken again when a reader complains."""

from __future__ import annotations

from mooncake.base import PutEnd, Unpin
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import NodeWorld, key, keys, worker

WRITER, READER = worker("prefill-0"), worker("decode-0")


def hashing_world(**settings) -> NodeWorld:
    world = NodeWorld(4, media=[SimMedium()], checksums=True, **settings)
    world.tick(1.0)
    return world


def test_a_reader_is_promised_what_the_block_hashes_to_once_that_is_known() -> None:
    world = hashing_world()
    world.put(WRITER, keys(1, 2))
    early = world.pin(READER, keys(1, 2))
    assert early.checksums == [], "a reader is not kept waiting for it"
    world.tick(2.0)
    late = world.pin(READER, keys(1, 2))
    assert late.checksums == [world.checksum(block) for block in keys(1, 2)]


def test_a_writer_that_knows_the_checksum_is_believed() -> None:
    world = hashing_world()
    grant = world.start(WRITER, keys(1))
    world.write(grant.places, grant.places.offsets[0], key(1))
    right = world.checksum(key(1))
    world.handle(PutEnd(writer=WRITER, ticket=grant.ticket, written=keys(1), checksums=[right]))
    assert world.pin(READER, keys(1)).checksums == [right]


def test_a_checksum_comes_back_from_the_disk_with_its_block() -> None:
    world = hashing_world(ssd_min_uses=1, ssd_write_at=0.0)
    world.put(WRITER, keys(1))
    world.tick(2.0)
    world.boot()
    world.tick(3.0)
    assert world.pin_soon(READER, keys(1)).checksums == [world.checksum(key(1))]


def test_memory_that_was_damaged_is_given_up_when_a_reader_says_so() -> None:
    world = hashing_world()
    world.put(WRITER, keys(1, 2))
    world.tick(2.0)
    pinned = world.pin(READER, keys(1, 2))
    world.write(pinned.places, pinned.places.offsets[1], b"other".ljust(16))
    world.handle(Unpin(reader=READER, ticket=pinned.ticket, corrupt=keys(2)))
    world.tick(3.0)
    assert world.inventory == {key(1)}
    assert world.node.counters["blocks_damaged"] == 1


def test_memory_is_not_blamed_for_the_wire() -> None:
    world = hashing_world()
    world.put(WRITER, keys(1))
    world.tick(2.0)
    pinned = world.pin(READER, keys(1))
    world.handle(Unpin(reader=READER, ticket=pinned.ticket, corrupt=keys(1, 99)))
    world.tick(3.0)
    assert world.inventory == {key(1)}
    assert world.node.counters["blocks_reported_corrupt"] == 2
    assert world.node.counters["blocks_damaged"] == 0


def test_what_waits_to_be_hashed_is_bounded_by_what_is_there() -> None:
    """Blocks that come and go faster than they are hashed leave the queue with their memory."""
    world = hashing_world()
    hashing = world.node.blocks.hashing
    num_blocks = world.node.blocks.dram.num_blocks
    hashing._op_id = -1  # an operation that does not end
    for number in range(10 * num_blocks):
        world.put(WRITER, keys(number))
        hashing.suspect(keys(number))
        assert len(hashing._queue) <= 2 * num_blocks


def test_a_block_is_not_reused_while_it_is_hashed() -> None:
    world = hashing_world()
    world.put(WRITER, keys(1, 2, 3, 4))
    assert world.start(WRITER, keys(11, 12)).keys == []
    world.tick(2.0)
    assert world.start(WRITER, keys(13, 14)).keys == keys(13, 14)
