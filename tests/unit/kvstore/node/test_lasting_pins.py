"""Pins that outlive who set them: soft ones go last, hard ones never, within what a node allows."""

from __future__ import annotations

import pytest

from mooncake.base import PinBlocks
from mooncake.base.pool_messages import LastingPin, PinsSet, RemoveBlocks, SetPins
from mooncake.kvstore.eviction import POLICIES, LastPolicy
from tests.support.kvstore.node_world import BLOCK, NodeWorld, key, keys, worker

P, C = worker("prefill-0"), worker("client")


def pin(world: NodeWorld, how: LastingPin, *numbers: int, epoch: str = "") -> list[bool]:
    wish = SetPins(asker=C, ticket=world.ticket(), keys=keys(*numbers), pin=how, epoch=epoch)
    return world.answer(wish, PinsSet).done


def fill(world: NodeWorld, *numbers: int, tenant: str = "") -> list[int]:
    """Put blocks one after the other; return which had room."""
    return [n for n in numbers if world.put(P, keys(n), tenant)]


@pytest.fixture(params=sorted(POLICIES))
def world(request: pytest.FixtureRequest) -> NodeWorld:
    return NodeWorld(6, high_watermark=1.0, eviction=request.param)


def test_hard_pins_are_never_evicted(world: NodeWorld) -> None:
    fill(world, *range(6))
    assert pin(world, LastingPin.HARD, 0, 1) == [True, True]
    fill(world, *range(10, 30))
    assert set(keys(0, 1)) <= world.inventory
    assert pin(world, LastingPin.NONE, 0, 1) == [True, True]
    fill(world, *range(30, 50))
    assert not set(keys(0, 1)) & world.inventory


def test_soft_pins_go_after_all_others(world: NodeWorld) -> None:
    fill(world, *range(6))
    assert pin(world, LastingPin.SOFT, 0, 1, 2) == [True] * 3
    grants = [world.start(P, keys(10)), world.start(P, keys(11)), world.start(P, keys(12))]
    assert all(grant.keys for grant in grants)
    assert world.inventory == set(keys(0, 1, 2)), "the others went first"
    assert world.start(P, keys(13)).keys == keys(13), "then these"
    assert len(world.inventory) == 2


def test_only_what_lies_there_whole_is_pinned(world: NodeWorld) -> None:
    world.start(P, keys(1))
    assert pin(world, LastingPin.HARD, 1, 2) == [False, False]


def test_there_are_so_many_hard_pins_and_no_more(world: NodeWorld) -> None:
    fill(world, *range(6))
    assert pin(world, LastingPin.HARD, *range(5)) == [True] * 3 + [False] * 2
    assert pin(world, LastingPin.HARD, 0) == [True], "it is one already"
    assert world.node.state().num_hard_pinned == 3
    assert pin(world, LastingPin.SOFT, 0) == [True]
    assert pin(world, LastingPin.HARD, 4) == [True]
    assert (world.node.state().num_hard_pinned, world.node.state().num_soft_pinned) == (3, 1)


def test_the_wish_for_another_boot_does_nothing(world: NodeWorld) -> None:
    fill(world, 0)
    assert pin(world, LastingPin.HARD, 0, epoch=world.store.epoch) == [True]
    assert pin(world, LastingPin.NONE, 0, epoch="an earlier one") == [False]
    assert world.node.state().num_hard_pinned == 1
    world.boot()
    fill(world, 0)
    assert world.node.state().num_hard_pinned == 0, "a new boot has forgotten"


def test_readers_and_pins_do_not_get_in_each_others_way(world: NodeWorld) -> None:
    fill(world, *range(6))
    reading = world.pin(P, keys(0))
    pin(world, LastingPin.HARD, 0, 1)
    world.unpin(P, reading)
    again = world.answer(PinBlocks(reader=P, ticket=world.ticket(), keys=keys(1)), type(reading))
    pin(world, LastingPin.NONE, 1)
    fill(world, *range(10, 30))
    assert key(0) in world.inventory, "pinned hard"
    assert key(1) in world.inventory, "being read"
    world.unpin(P, again)
    fill(world, *range(30, 50))
    assert key(1) not in world.inventory


def test_hard_pins_take_room_of_their_tenant() -> None:
    world = NodeWorld(8, high_watermark=1.0, tenant_quota_bytes={"t": 2 * BLOCK})
    assert fill(world, 0, 1, tenant="t") == [0, 1]
    assert pin(world, LastingPin.HARD, 0, 1) == [True, True]
    assert fill(world, 2, tenant="t") == [], "its quota is full of what stays"
    assert fill(world, 10, 11, 12) == [10, 11, 12], "others have room"
    pin(world, LastingPin.SOFT, 0)
    assert fill(world, 2, tenant="t") == [2]
    assert key(0) not in world.inventory


def test_what_is_gone_is_not_pinned_any_more() -> None:
    world = NodeWorld(6, high_watermark=1.0)
    fill(world, 0)
    fill(world, *range(1, 6))
    pin(world, LastingPin.SOFT, *range(6))
    fill(world, *range(10, 30))
    assert world.node.state().num_soft_pinned == 5, "every new block took another's place"
    world.handle(RemoveBlocks(asker=C, ticket=1, keys=list(world.inventory)))
    fill(world, *range(6))
    assert world.node.state().num_soft_pinned == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_block_may_change_sides_while_it_is_held(name: str) -> None:
    policy = LastPolicy(POLICIES[name])
    policy.release([b"a", b"b"])
    policy.hold(b"a")
    policy.set_last(b"a", True)
    assert len(policy) == 1, "it is held on the other side too"
    policy.release([b"a"])
    policy.set_last(b"b", True)
    policy.set_last(b"a", False)
    policy.access([b"a", b"b"])
    assert [policy.pop(), policy.pop(), policy.pop()] == [b"a", b"b", None]
    policy.forget(b"a")
    assert len(policy) == 0
