"""Nodes that go hand what only they hold to those that stay, whatever happens meanwhile."""

from __future__ import annotations

from typing import TypeVar

import pytest

from mooncake.base import (
    BlockKey,
    Drain,
    InternalError,
    PeerLost,
    PutEnd,
    PutGranted,
    PutStart,
    WorkerRef,
)
from mooncake.base.messages import Message, Replicate
from mooncake.base.pool_messages import (
    DrainProgress,
    FindHomes,
    Home,
    HomesFound,
    LastingPin,
    TakenOver,
    TakeOver,
)
from mooncake.kvstore.node.drain_migration import TRANSITIONS, State
from tests.support.kvstore.node_world import BLOCK, NodeWorld, keys, worker
from tests.support.kvstore.pool_world import CLIENT, PoolWorld, bytes_of


def progress(world: PoolWorld, name: str) -> DrainProgress:
    found = world.nodes[name].state().drain
    assert found is not None
    return found


def run_to_end(world: PoolWorld, name: str, seconds: float = 40.0) -> DrainProgress:
    """Let time pass until the node may be ended; return what became of its blocks."""
    for _ in range(round(seconds / 0.1)):
        if world.nodes[name].drained:
            return progress(world, name)
        world.run(0.1)
    raise AssertionError("it is not drained")


def test_what_only_it_holds_is_copied_and_nothing_else() -> None:
    world = PoolWorld()
    for name in "abc":
        world.start(name, 16)
    world.put("a", keys(*range(1, 9)))
    world.put("b", keys(1, 2))
    assert progress_none(world)
    world.drain("a")
    end = run_to_end(world, "a")
    assert end == DrainProgress(over=True, num_copied=6, num_elsewhere=2)
    assert world.holders(keys(1)[0]) == ["a", "b"], "there was a copy already"
    for number in range(3, 9):
        assert len(world.holders(keys(number)[0])) == 2, "one copy each"
    world.kill("a")
    for number in range(1, 9):
        [holder] = world.holders(keys(number)[0])
        assert world.read(holder, keys(number)) == 1


def progress_none(world: PoolWorld) -> bool:
    return all(node.state().drain is None for node in world.nodes.values())


def named(world: PoolWorld, key: BlockKey) -> list[str]:
    """Return whom the gateway would send a reader to."""
    return [replica.worker.worker_id for replica in world.gateway._conductor.replicas(key)]


def test_readers_are_served_until_it_is_over() -> None:
    world = PoolWorld(link_bytes_per_s=2.0 * BLOCK)
    for name in "ab":
        world.start(name, 16)
    world.put("a", keys(*range(1, 9)))
    world.drain("a")
    world.run(1.0)
    assert not progress(world, "a").over
    assert "a" in named(world, keys(1)[0])
    assert world.read("a", keys(1, 2)) == 2
    run_to_end(world, "a")
    world.run(0.1)
    assert "a" not in named(world, keys(1)[0])
    assert named(world, keys(8)[0]) == ["b"]


def test_the_hottest_go_first_and_the_rate_is_bounded() -> None:
    world = PoolWorld()
    world.start("a", 16, drain_bytes_per_s=4 * BLOCK, drain_queue_bytes=BLOCK)
    world.start("b", 16)
    world.put("a", keys(*range(1, 9)))
    world.read("a", keys(5, 6))
    world.drain("a")
    world.run(0.55)
    taken = [n for n in range(1, 9) if world.nodes["b"].stores(keys(n)[0])]
    assert taken == [1, 5, 6], "what was read last, then the head of the rest"
    assert run_to_end(world, "a").num_copied == 8


def test_no_room_is_made_by_pushing_out_what_is_worth_as_much() -> None:
    world = PoolWorld()
    world.start("a", 16)
    world.start("b", 8, high_watermark=1.0)
    world.put("b", keys(201, 202, 203))
    world.put("b", keys(101, 102, 103), uses=3)
    world.put("a", keys(1, 2, 3))
    world.put("a", keys(4, 5, 6, 7, 8, 9), uses=2)
    world.drain("a")
    end = run_to_end(world, "a")
    held = {number for number in range(1, 300) if world.nodes["b"].stores(keys(number)[0])}
    assert held == {101, 102, 103, 4, 5, 6, 7, 8}, "two free, and three that were used once"
    assert (end.num_copied, end.num_left, end.num_left_on_ssd) == (5, 4, 0)


def test_blocks_that_no_node_takes_stay_on_ssd_and_are_reported() -> None:
    world = PoolWorld()
    world.start("a", 16, ssd_blocks=16)
    world.start("b", 3, high_watermark=1.0)
    world.put("a", keys(1, 2, 3, 4, 5), uses=2)
    world.put("a", keys(6))
    world.drain("a")
    end = run_to_end(world, "a")
    assert (end.num_copied, end.num_left, end.num_left_on_ssd) == (3, 3, 2)


def test_blocks_on_ssd_only_go_after_those_in_dram() -> None:
    world = PoolWorld()
    world.start("a", 4, ssd_blocks=16, ssd_write_at=0.0, high_watermark=1.0)
    world.start("b", 16)
    world.put("a", keys(1, 2, 3, 4), uses=2)
    world.run(1.0)
    world.put("a", keys(11, 12, 13, 14), uses=2)
    assert not any(world.nodes["a"].stores(key) for key in keys(1, 2, 3, 4))
    world.drain("a")
    assert run_to_end(world, "a").num_copied == 8
    world.kill("a")
    assert world.read("b", keys(1, 2, 3, 4)) == 4
    assert world.read("b", keys(11, 12, 13, 14)) == 4


def test_quotas_and_pins_are_those_of_the_new_home() -> None:
    world = PoolWorld()
    world.start("a", 16)
    world.start("b", 16, tenant_quota_bytes={"small": 2 * BLOCK}, hard_pin_share=0.1)
    world.put("a", keys(1, 2, 3, 4), "small", uses=2)
    world.put("a", keys(11, 12, 13), "large")
    world.put("a", keys(21, 22, 23))
    world.set_pins("a", keys(21, 22), LastingPin.HARD)
    world.set_pins("a", keys(23), LastingPin.SOFT)
    world.drain("a")
    end = run_to_end(world, "a")
    assert (end.num_copied, end.num_left) == (8, 2)
    state = world.nodes["b"].state()
    assert (state.num_hard_pinned, state.num_soft_pinned) == (1, 2), "one hard pin has room"


@pytest.mark.parametrize("killed_after_s", [0.3, 1.1, 2.6])
def test_a_node_that_dies_meanwhile_takes_nothing_with_it(killed_after_s: float) -> None:
    world = PoolWorld(link_bytes_per_s=2.0 * BLOCK)
    for name in "abc":
        world.start(name, 32, drain_queue_bytes=2 * BLOCK, drain_s=60.0)
    everything = keys(*range(1, 17))
    world.put("b", everything[:3])
    world.put("a", everything)
    world.drain("a")
    world.run(killed_after_s)
    world.kill("b")
    end = run_to_end(world, "a", 120.0)
    assert end == DrainProgress(over=True, num_copied=16)
    world.kill("a")
    assert world.read("c", everything) == 16


def test_a_source_that_dies_leaves_whole_blocks_or_none() -> None:
    world = PoolWorld(link_bytes_per_s=4.0 * BLOCK)
    for name in "ab":
        world.start(name, 16)
    world.put("a", keys(*range(1, 9)))
    world.drain("a")
    world.run(1.0)
    world.kill("a")
    world.run(15.0)
    node = world.nodes["b"]
    assert node.quiet
    held = [key for key in keys(*range(1, 9)) if node.stores(key)]
    assert all(world.read("b", [key]) == 1 for key in held)


def test_all_that_go_together_copy_nothing_to_each_other_for_long() -> None:
    world = PoolWorld()
    for name in "ab":
        world.start(name, 16)
        world.put(name, keys(ord(name)))
    world.drain("a")
    world.drain("b")
    for name in "ab":
        assert run_to_end(world, name, 5.0).num_left <= 1


def test_alone_or_without_a_gateway_it_is_over_soon() -> None:
    world = PoolWorld()
    world.start("a", 16)
    world.put("a", keys(1, 2))
    world.network.partition("node-a", "node-g", cut=True)
    world.drain("a")
    assert run_to_end(world, "a", 5.0) == DrainProgress(over=True, num_left=2)


def test_the_time_for_it_is_bounded() -> None:
    world = PoolWorld(link_bytes_per_s=0.5 * BLOCK)
    world.start("a", 16, drain_s=5.0, drain_queue_bytes=BLOCK)
    world.start("b", 16)
    world.put("a", keys(*range(1, 9)))
    world.drain("a")
    end = run_to_end(world, "a", 30.0)
    assert end.over
    assert 0 < end.num_left < 8
    assert end.num_copied + end.num_left == 8


def test_what_becomes_whole_meanwhile_goes_too() -> None:
    world = PoolWorld()
    world.start("a", 16, drain_bytes_per_s=10 * BLOCK, drain_queue_bytes=BLOCK)
    world.start("b", 16)
    world.put("a", keys(*range(1, 9)))
    start = PutStart(writer=CLIENT, ticket=1000, keys=keys(20))
    offset = world.ask("a", start, PutGranted).places.offsets[0]
    world.drain("a")
    world.run(0.1)
    world.nodes["a"].region.buffer[offset : offset + BLOCK] = bytes_of(keys(20)[0])
    world.send("a", PutEnd(writer=CLIENT, ticket=1000, written=keys(20)))
    assert run_to_end(world, "a") == DrainProgress(over=True, num_copied=9)
    assert world.read("b", keys(20)) == 1


def test_new_homes_in_mid_drain_are_found() -> None:
    """The gateway is asked in turns; whoever has come by then is named."""
    world = PoolWorld()
    world.start("a", 800, drain_bytes_per_s=500 * BLOCK, drain_queue_bytes=8 * BLOCK)
    world.start("b", 300)
    everything: list[BlockKey] = keys(*range(1, 701))
    for first in range(0, 700, 350):
        world.put("a", everything[first : first + 350])
    world.drain("a")
    world.start("c", 800)
    assert not progress(world, "a").over
    assert run_to_end(world, "a").num_copied == 700


def test_a_put_that_ends_when_all_else_is_done_goes_too() -> None:
    world = PoolWorld()
    world.start("a", 16)
    world.start("b", 16)
    start = PutStart(writer=CLIENT, ticket=1000, keys=keys(20, 21))
    granted = world.ask("a", start, PutGranted)
    world.drain("a")
    world.run(3.0)
    assert not progress(world, "a").over, "a block may become whole yet"
    offset = granted.places.offsets[0]
    world.nodes["a"].region.buffer[offset : offset + BLOCK] = bytes_of(keys(20)[0])
    end = PutEnd(writer=CLIENT, ticket=1000, written=keys(20), dropped=keys(21))
    world.send("a", end)
    assert run_to_end(world, "a") == DrainProgress(over=True, num_copied=1)
    assert world.read("b", keys(20)) == 1


def test_what_is_still_coming_from_another_node_that_drains_goes_on_to_the_next() -> None:
    world = PoolWorld(link_bytes_per_s=8.0 * BLOCK)
    world.start("a", 16)
    world.start("b", 16)
    world.put("a", keys(*range(1, 9)))
    world.drain("a")
    while not world.nodes["b"].blocks.replicator.filling():
        world.run(0.01)
    world.start("c", 16)
    world.drain("b")
    run_to_end(world, "a")
    world.kill("a")
    run_to_end(world, "b")
    world.kill("b")
    assert world.read("c", keys(*range(1, 9))) == 8


@pytest.mark.parametrize("is_pulled_copy", [False, True])
def test_a_copy_elsewhere_is_pinned_as_the_block_was(is_pulled_copy: bool) -> None:
    """And is no copy any more, which would be dropped when nobody reads it."""
    world = PoolWorld()
    world.start("a", 16)
    world.start("b", 16, replica_idle_s=2.0)
    world.put("a", keys(1, 2, 3))
    if is_pulled_copy:
        world.send("b", Replicate(source=world.refs["a"], keys=keys(1, 2, 3)))
        world.run(1.0)
        assert world.holders(keys(3)[0]) == ["a", "b"]
    else:
        world.put("b", keys(1, 2, 3))
    world.set_pins("a", keys(1), LastingPin.HARD)
    world.set_pins("a", keys(2), LastingPin.SOFT)
    world.drain("a")
    assert run_to_end(world, "a") == DrainProgress(over=True, num_copied=2, num_elsewhere=1)
    world.kill("a")
    state = world.nodes["b"].state()
    assert (state.num_hard_pinned, state.num_soft_pinned) == (1, 1)
    world.run(10.0)
    assert world.read("b", keys(1, 2)) == 2


Answer = TypeVar("Answer", bound=Message)


class Alone:
    """A node's drain, with whoever it asks played by the test."""

    def __init__(self) -> None:
        self.world = NodeWorld(8, drain_s=20.0)
        self.world.put(worker("p"), keys(1, 2))
        self._grant = self.world.start(worker("p"), keys(9))
        self.num_seen = len(self.world.channel.sent)
        self.world.handle(Drain())

    def sent(self, kind: type[Answer]) -> list[Answer]:
        """Let a moment pass; return what of this kind has been sent since the last look."""
        self.world.tick(self.world.now)
        fresh = self.world.channel.sent[self.num_seen :]
        self.num_seen += len(fresh)
        return [message for _, message in fresh if isinstance(message, kind)]

    def name(self, *stores: WorkerRef) -> None:
        """Answer the node's question: its blocks are nowhere else, and these nodes stay."""
        [question] = self.sent(FindHomes)
        alone, homes = [False] * len(question.keys), [Home(store, 8) for store in stores]
        self.world.handle(HomesFound(
            asker=question.asker, ticket=question.ticket, elsewhere=alone, homes=homes
        ))  # fmt: skip

    def take(self, store: WorkerRef, order: TakeOver) -> None:
        self.world.handle(TakenOver(
            asker=order.source, ticket=order.ticket, store=store, keys=order.keys
        ))  # fmt: skip

    def end_put(self) -> None:
        """A block becomes whole that was being written when the node was told to go."""
        self.world.end(worker("p"), self._grant)

    def progress(self) -> DrainProgress:
        found = self.world.node.state().drain
        assert found is not None
        return found


OLD, NEW = worker("b", "e1"), worker("b", "e2")


def test_answers_to_an_earlier_boot_at_the_same_address_are_not_taken() -> None:
    scene = Alone()
    earlier = worker("kv-0", "e0")
    nowhere = HomesFound(asker=earlier, ticket=1, elsewhere=[False] * 2, homes=[])
    scene.world.handle(nowhere)
    scene.name(NEW)
    [order] = scene.sent(TakeOver)
    late = TakenOver(asker=earlier, ticket=order.ticket, store=NEW, keys=order.keys)
    scene.world.handle(late)
    assert scene.progress().num_copied == 0
    scene.take(NEW, order)
    assert scene.progress().num_copied == 2


@pytest.mark.parametrize("named_later", [[NEW], []])
def test_the_loss_of_a_home_that_is_not_named_any_more_still_counts(named_later: list) -> None:
    """It was started again, or drains itself, before the word of its loss came."""
    scene = Alone()
    scene.name(OLD)
    [order] = scene.sent(TakeOver)
    assert order.keys == keys(1, 2)
    scene.take(OLD, order)
    scene.end_put()
    scene.name(*named_later)
    scene.world.handle(PeerLost(worker=OLD))
    [question] = scene.sent(FindHomes)
    assert question.keys == keys(1, 2), "they are ours alone again"


def test_the_word_of_an_earlier_boot_is_not_taken_for_that_of_a_home() -> None:
    scene = Alone()
    scene.name(NEW)
    [order] = scene.sent(TakeOver)
    scene.take(OLD, order)
    assert scene.progress().num_copied == 0
    scene.take(NEW, order)
    assert scene.progress().num_copied == 2


def test_every_block_of_a_drain_ends_somewhere_and_illegal_moves_are_refused() -> None:
    assert set(TRANSITIONS) == set(State)
    for old in (State.UNASKED, State.ASKED, State.SOLE, State.ORDERED):
        assert State.LEFT in TRANSITIONS[old], "when time is up"
    migration = Alone().world.node.blocks.migration
    [asked, _] = keys(1, 2)
    for new in set(State) - TRANSITIONS[State.ASKED]:
        with pytest.raises(InternalError, match=f"from asked to {new.value}"):
            migration._move(asked, new)
