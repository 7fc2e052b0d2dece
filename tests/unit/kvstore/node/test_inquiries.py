"""Asking a pool node: what is there, take it away, bring it up, how are you."""

from __future__ import annotations

from mooncake.base import Tier
from mooncake.base.messages import Prefetch
from mooncake.base.pool_messages import (
    AskPool,
    BlocksFound,
    BlocksRemoved,
    FindBlocks,
    PoolState,
    RemoveBlocks,
)
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import BLOCK, NodeWorld, keys, worker

WRITER, READER = worker("prefill-0"), worker("decode-0")


def world_of(num_blocks: int = 2) -> NodeWorld:
    world = NodeWorld(
        num_blocks, media=[SimMedium()], ssd_min_uses=1, ssd_write_at=0.0, high_watermark=1.0
    )
    world.tick(1.0)
    return world


def put(world: NodeWorld, *numbers: int) -> None:
    world.put(WRITER, keys(*numbers))
    world.tick(world.now + 1)


def find(world: NodeWorld, *numbers: int) -> list[Tier | None]:
    message = FindBlocks(asker=READER, ticket=3, keys=keys(*numbers))
    return world.answer(message, BlocksFound).tiers


def remove(world: NodeWorld, *numbers: int) -> list[bool]:
    message = RemoveBlocks(asker=READER, ticket=4, keys=keys(*numbers))
    before = len(world.channel.sent)
    world.handle(message)
    world.tick(world.now + 1)
    answers = [sent for _, sent in world.channel.sent[before:] if isinstance(sent, BlocksRemoved)]
    assert len(answers) == 1
    assert not any(answers[0].left)
    return answers[0].removed


def test_looking_holds_nothing_and_uses_nothing() -> None:
    world = world_of(num_blocks=2)
    put(world, 1)
    put(world, 2)
    assert find(world, 1, 7) == [Tier.DRAM, None]
    assert world.node.num_open == 0
    put(world, 3)
    assert find(world, 1, 2, 3) == [Tier.SSD, Tier.DRAM, Tier.DRAM], "the oldest went all the same"


def test_what_is_removed_is_gone_from_all_tiers_and_stays_gone() -> None:
    world = world_of(num_blocks=2)
    put(world, 1)
    put(world, 2)
    put(world, 3)
    assert remove(world, 1, 2, 99) == [True, True, False]
    assert find(world, 1, 2, 3) == [None, None, Tier.DRAM]
    assert (world.inventory, world.on_ssd) == (set(keys(3)), set(keys(3)))
    world.boot()
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(3))


def test_a_run_is_brought_up_before_its_reader_comes() -> None:
    world = world_of(num_blocks=2)
    put(world, 1, 2)
    put(world, 3, 4)
    assert find(world, 1, 2) == [Tier.SSD, Tier.SSD]
    world.handle(Prefetch(reader=READER, ticket=1, keys=keys(1, 2, 8)))
    world.tick(world.now + 1)
    assert find(world, 1, 2) == [Tier.DRAM, Tier.DRAM]
    assert world.node.num_open == 0
    assert world.pin(READER, keys(1, 2)).num_blocks == 2, "at once"


def test_a_node_says_how_it_is_doing() -> None:
    world = world_of(num_blocks=4)
    put(world, 1, 2)
    state = world.answer(AskPool(asker=READER, ticket=5), PoolState)
    assert (state.ticket, state.store) == (5, world.store)
    assert (state.load.num_total_blocks, state.load.num_cached_blocks) == (4, 2)
    assert (state.num_ssd_blocks, state.num_ssd_stored, state.block_bytes) == (8, 2, BLOCK)
    assert state.load.counters["blocks_put"] == 2
