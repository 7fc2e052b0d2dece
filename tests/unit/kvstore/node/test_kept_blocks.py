"""A node keeps the blocks that requests want kept: for their time, within limits, whatever others
put. What is kept can still be read, removed and pinned.
"""

from __future__ import annotations

import math

import pytest

from mooncake.base import PinBlocks, PinGranted, PutGranted, PutStart
from mooncake.base.messages import ChainHead
from mooncake.base.pool_messages import BlocksRemoved, LastingPin, PinsSet, RemoveBlocks, SetPins
from mooncake.kvstore.config import MAX_KEEP_S
from mooncake.kvstore.eviction import POLICIES
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import BLOCK, NodeWorld, key, keys, worker

P, C = worker("prefill-0"), worker("client")


def node(eviction: str = "lru", **settings) -> NodeWorld:
    """A node of 16 blocks, of which 8 may be kept, 4 of one tenant."""
    shares = {"kept_share": 0.5, "tenant_kept_share": 0.25, "high_watermark": 1.0} | settings
    return NodeWorld(16, eviction=eviction, **shares)


def put(
    world: NodeWorld, *numbers: int, keep_s: float = 300.0, num_kept: int = 99, tenant: str = ""
) -> None:
    """Put a chain of blocks, of which the request wants the leading ones kept."""
    head = ChainHead([], 0, num_kept, keep_s)
    start = PutStart(writer=P, ticket=world.ticket(), keys=keys(*numbers), tenant=tenant, head=head)
    world.end(P, world.answer(start, PutGranted))


def report_use(world: NodeWorld, *numbers: int, keep_s: float = 300.0, num_kept: int = 99) -> None:
    """Report a request that found the chain in an engine's own pages."""
    head = ChainHead(keys(*numbers), 0, num_kept, keep_s)
    world.handle(PutStart(writer=P, ticket=world.ticket(), keys=[], head=head))


def flood(world: NodeWorld, first: int = 100, count: int = 50, tenant: str = "other") -> None:
    """Put so many blocks of another tenant, one after the other."""
    for number in range(first, first + count):
        world.put(P, keys(number), tenant)


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_kept_blocks_stay_while_others_come_and_go(eviction: str) -> None:
    world = node(eviction)
    put(world, 1, 2, 3)
    flood(world)
    assert set(keys(1, 2, 3)) <= world.inventory
    assert world.node.state().num_kept == 3
    world.tick(world.now + 310.0)
    assert world.node.state().num_kept == 0
    assert world.node.counters["keeps_expired"] == 3
    flood(world, 200)
    assert not set(keys(1, 2, 3)) & world.inventory, "their time is over"


def test_only_the_leading_blocks_are_kept_and_only_if_asked_for() -> None:
    world = node()
    put(world, 1, 2, 3, num_kept=2)
    put(world, 10, keep_s=0.0)
    put(world, 11, num_kept=0)
    flood(world)
    assert set(keys(1, 2)) <= world.inventory
    assert not set(keys(3, 10, 11)) & world.inventory


def test_what_is_to_be_kept_goes_down_to_ssd_although_it_was_used_once() -> None:
    """Also what is beyond the tenant's part, so that a turn that comes too late finds it there."""
    world = node(media=[SimMedium()], ssd_write_at=0.0)
    world.tick(1.0)
    put(world, 1, 2, 3, 4, 5)
    put(world, 10, 11, keep_s=0.0)
    world.tick(2.0)
    assert world.node.state().num_kept == 4
    assert world.on_ssd == set(keys(1, 2, 3, 4, 5))
    flood(world)
    assert world.pin_soon(C, keys(1, 2, 3, 4, 5)).num_blocks == 5


@pytest.mark.parametrize("keep_s", [math.nan, -1.0, -math.inf])
def test_a_time_that_is_none_keeps_nothing(keep_s: float) -> None:
    world = node()
    put(world, 1, keep_s=keep_s)
    put(world, 2, num_kept=-1)
    assert world.node.state().num_kept == 0


def test_nothing_is_kept_for_longer_than_an_hour() -> None:
    world = node()
    put(world, 1, keep_s=math.inf)
    world.tick(world.now + MAX_KEEP_S - 1)
    assert world.node.state().num_kept == 1
    world.tick(world.now + 10.0)
    assert world.node.state().num_kept == 0


def test_each_request_that_asks_for_it_begins_the_time_anew() -> None:
    world = node()
    put(world, 1, 2)
    world.tick(world.now + 200.0)
    report_use(world, 1, 2)
    world.tick(world.now + 200.0)
    reading = PinBlocks(
        reader=C, ticket=world.ticket(), keys=keys(2), head=ChainHead(keys(1), 0, 2, 300.0)
    )
    world.unpin(C, world.answer(reading, PinGranted))
    world.tick(world.now + 200.0)
    assert world.node.state().num_kept == 2
    report_use(world, 1, 2, keep_s=0.0)
    world.tick(world.now + 110.0)
    assert world.node.state().num_kept == 0
    assert world.node.counters["blocks_kept"] == 2, "each began once"


def test_a_tenant_keeps_no_more_than_its_part_and_its_oldest_go_first() -> None:
    world = node()
    put(world, 1, 2, 3, tenant="t")
    put(world, 4, 5, 6, tenant="t")
    assert world.node.state().num_kept == 4
    assert world.node.counters["keeps_displaced"] == 2
    flood(world)
    assert {key(n) for n in range(1, 7)} & world.inventory == set(keys(1, 4, 5, 6))


def test_who_keeps_much_leaves_room_for_others_to_keep_and_to_put() -> None:
    world = node(tenant_kept_share=0.5)
    for first in range(0, 40, 4):
        put(world, *range(first, first + 4), tenant="greedy")
    assert world.node.state().num_kept == 8
    put(world, 100, 101, 102, tenant="modest")
    assert world.node.state().num_kept == 8
    flood(world, 200)
    assert set(keys(100, 101, 102)) <= world.inventory
    granted = world.start(P, keys(*range(300, 308)), "third")
    assert len(granted.keys) == 8, "half of the node is a cache for all"


def test_thousands_of_sessions_of_a_tenant_take_its_part_and_nothing_is_left_of_them() -> None:
    world = node()
    put(world, 1, 2, tenant="modest")
    for number in range(3_000):
        put(world, 1_000 + number, tenant="greedy", keep_s=3600.0)
    assert world.node.state().num_kept == 2 + 4
    assert set(keys(1, 2)) <= world.inventory
    granted = world.start(P, keys(*range(10, 20)), "third")
    assert len(granted.keys) == 16 - 6, "all but what is kept"
    world.end(P, granted)
    world.tick(world.now + 3610.0)
    assert world.node.state().num_kept == 0
    assert world.put(P, keys(*range(20, 36)), "third") == keys(*range(20, 36)), "all of the node"


def test_a_tenant_at_its_quota_can_still_put() -> None:
    world = node(tenant_quota_bytes={"t": 4 * BLOCK})
    put(world, 1, 2, 3, 4, tenant="t")
    assert world.node.state().num_kept == 2, "half of its quota"
    assert world.put(P, keys(5, 6), "t") == keys(5, 6)
    assert set(keys(1, 2)) <= world.inventory


def test_kept_blocks_are_read_removed_and_pinned_like_others() -> None:
    world = node()
    put(world, 1, 2, 3, 4)
    reading = world.pin(C, keys(1))
    remove = RemoveBlocks(asker=C, ticket=world.ticket(), keys=keys(1, 2))
    assert world.answer(remove, BlocksRemoved).removed == [True, True]
    assert world.node.state().num_kept == 2
    world.unpin(C, reading)
    pins = SetPins(asker=C, ticket=world.ticket(), keys=keys(3), pin=LastingPin.HARD)
    assert world.answer(pins, PinsSet).done == [True]
    world.tick(world.now + 310.0)
    flood(world)
    assert key(3) in world.inventory, "the pin lasts longer"
    assert key(4) not in world.inventory


def test_nothing_is_kept_where_the_share_is_0_and_a_new_boot_has_forgotten() -> None:
    world = node(kept_share=0.0)
    put(world, 1)
    assert world.node.state().num_kept == 0
    world = node()
    put(world, 1)
    world.boot()
    put(world, 1, keep_s=0.0)
    assert world.node.state().num_kept == 0
