"""Runs that come up from SSD before their reader: in order, in part, never at the cost of blocks
that are worth as much.
"""

from __future__ import annotations

from mooncake.base import Drain, Tier, WorkerRef
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.base.pool_messages import BlocksFound, FindBlocks
from mooncake.kvstore.storage.promotion import MAX_CLIENT_RUNS, MAX_RUNS
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import BLOCK, NodeWorld, keys, worker

P, READER = worker("prefill-0"), worker("reader")


def world_of(num_blocks: int, **settings: int) -> NodeWorld:
    """A node that writes every block down at once."""
    world = NodeWorld(
        num_blocks, media=[SimMedium()], ssd_blocks=32, ssd_write_at=0.0, ssd_min_uses=1,
        high_watermark=1.0, **settings,
    )  # fmt: skip
    world.tick(1.0)
    return world


def put(world: NodeWorld, *numbers: int, uses: int = 1) -> None:
    world.put(P, keys(*numbers))
    for _ in range(uses - 1):
        world.unpin(READER, world.pin(READER, keys(*numbers)))
    world.tick(world.now + 1)


def tiers(world: NodeWorld, *numbers: int) -> list[Tier | None]:
    question = FindBlocks(asker=READER, ticket=world.ticket(), keys=keys(*numbers))
    return world.answer(question, BlocksFound).tiers


def prefetch(world: NodeWorld, ticket: int, *numbers: int) -> None:
    world.handle(Prefetch(reader=READER, ticket=ticket, keys=keys(*numbers)))


def test_blocks_that_were_asked_for_again_stay() -> None:
    world = world_of(4)
    put(world, 1, 2, 3)
    put(world, 11, 12, uses=2)
    put(world, 21, 22)
    assert tiers(world, 1, 2, 11, 12, 21, 22) == [Tier.SSD] * 2 + [Tier.DRAM] * 4
    world.unpin(READER, world.pin(READER, keys(11, 12)))
    prefetch(world, 1, 1, 2, 3)
    world.tick(world.now + 1)
    assert tiers(world, 1, 2, 3) == [Tier.DRAM, Tier.DRAM, Tier.SSD]
    assert tiers(world, 11, 12) == [Tier.DRAM] * 2
    assert world.node.counters["blocks_prefetched"] == 2


def test_a_run_longer_than_the_queue_of_the_disks_comes_up_whole() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, *range(1, 9))
    world.boot()
    world.tick(world.now + 1)
    prefetch(world, 1, *range(1, 9))
    world.tick(world.now + 1)
    assert tiers(world, *range(1, 9)) == [Tier.DRAM] * 8


def test_blocks_of_a_stopped_prefetch_stay_on_ssd() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, *range(1, 13))
    world.boot()
    world.tick(world.now + 1)
    prefetch(world, 1, *range(1, 7))
    prefetch(world, 2, *range(7, 13))
    world.handle(StopPrefetch(reader=READER, ticket=1))
    world.tick(world.now + 1)
    up = [tier is Tier.DRAM for tier in tiers(world, *range(1, 7))]
    assert sum(up) == 1, "the piece that was on its way"
    assert tiers(world, *range(7, 13)) == [Tier.DRAM] * 6
    world.handle(StopPrefetch(reader=READER, ticket=9))


def test_of_too_many_runs_the_last_are_forgotten() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, 1, 2, 3)
    world.boot()
    world.tick(world.now + 1)
    for ticket in range(MAX_RUNS + 10):
        prefetch(world, ticket, 1, 2)
    prefetch(world, 10_000, 3)
    world.tick(world.now + 1)
    assert tiers(world, 1, 2, 3) == [Tier.DRAM, Tier.DRAM, Tier.SSD]
    prefetch(world, 10_001, 3)
    world.tick(world.now + 1)
    assert tiers(world, 3) == [Tier.DRAM]


def test_readers_that_have_come_go_before() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, *range(1, 9))
    world.boot()
    world.tick(world.now + 1)
    prefetch(world, 1, *range(1, 7))
    pinned = world.pin_soon(READER, keys(8))
    assert pinned.num_blocks == 1
    world.unpin(READER, pinned)


def test_a_damaged_block_ends_its_run() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, 1, 2, 3)
    for slot in sorted(world.media[0].slots)[1:2]:
        world.media[0].damage(slot)
    world.boot()
    world.tick(world.now + 1)
    prefetch(world, 1, 1, 2, 3)
    world.tick(world.now + 1)
    assert tiers(world, 1)[0] is Tier.DRAM
    assert tiers(world, 3)[0] is not Tier.DRAM
    world.handle(Drain())


def test_clients_of_one_credential_leave_room_for_the_runs_of_others() -> None:
    world = world_of(16, ssd_queue_bytes=2 * BLOCK)
    put(world, 1, 2, 3)
    world.boot()
    world.tick(world.now + 1)
    for ticket in range(MAX_RUNS):
        client = WorkerRef(f"client-aa-{ticket}", "e1", "tcp://10.0.0.7:1#aa")
        named = keys(1, 2) if ticket < MAX_CLIENT_RUNS else keys(3)
        world.handle(Prefetch(reader=client, ticket=ticket, keys=named))
    prefetch(world, 1, 2)
    world.tick(world.now + 1)
    assert tiers(world, 1, 2, 3) == [Tier.DRAM, Tier.DRAM, Tier.SSD]
