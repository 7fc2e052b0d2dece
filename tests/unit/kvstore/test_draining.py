"""A node that is told to go: nobody is sent to it, nothing new is taken, disks get their due."""

from __future__ import annotations

from mooncake.base import Drain, Welcome
from mooncake.base.pool_messages import FindHomes, HomesFound
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import GATEWAY, NodeWorld, keys, worker


def drain(world: NodeWorld) -> None:
    """Tell the node to go, and that there is no other."""
    first = len(world.channel.sent)
    world.handle(Drain())
    answer(world, first)


def answer(world: NodeWorld, first: int) -> None:
    """Answer what the node has asked since it had sent `first` messages: it is alone."""
    for _, question in world.channel.sent[first:]:
        if isinstance(question, FindHomes):
            alone = [False] * len(question.keys)
            world.handle(HomesFound(
                asker=question.asker, ticket=question.ticket, elsewhere=alone, homes=[]
            ))  # fmt: skip


def test_it_tells_that_nothing_is_to_be_had_and_takes_nothing() -> None:
    world = NodeWorld()
    world.put(worker("p"), keys(1, 2))
    drain(world)
    assert world.inventory == set()
    assert world.load().draining, "for `mooncake status`"
    assert world.put(worker("p"), keys(3)) == []
    assert world.pin(worker("d"), keys(1, 2)).num_blocks == 2, "what is here can be read"


def test_it_is_drained_when_nothing_is_open() -> None:
    world = NodeWorld()
    grant = world.start(worker("p"), keys(1))
    assert not world.node.drained
    drain(world)
    assert not world.node.drained
    first = len(world.channel.sent)
    world.end(worker("p"), grant)
    world.tick(world.now)
    answer(world, first)
    assert world.inventory == set(), "nobody takes it: it is not to be had any more"
    pinned = world.pin(worker("d"), keys(1))
    assert not world.node.drained
    world.unpin(worker("d"), pinned)
    assert world.node.drained


def test_a_new_gateway_hears_of_nothing_either() -> None:
    world = NodeWorld()
    world.put(worker("p"), keys(1))
    drain(world)
    world.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
    assert world.inventory == set()


def test_what_was_used_twice_goes_down_first() -> None:
    world = NodeWorld(media=[SimMedium()])
    world.tick(1.0)
    world.put(worker("p"), keys(1, 2, 3))
    world.unpin(worker("d"), world.pin(worker("d"), keys(1, 2)))
    world.tick(2.0)
    assert world.on_ssd == set()
    drain(world)
    assert not world.node.drained
    world.tick(3.0)
    assert world.node.drained
    world.boot()
    world.tick(4.0)
    assert world.on_ssd == set(keys(1, 2))


def test_a_disk_that_refuses_does_not_hold_it_up() -> None:
    medium = SimMedium()
    world = NodeWorld(media=[medium])
    world.tick(1.0)
    world.put(worker("p"), keys(1))
    world.unpin(worker("d"), world.pin(worker("d"), keys(1)))
    medium.refuses_writes = True
    drain(world)
    world.tick(2.0)
    assert world.node.drained
    assert world.node.state().draining
