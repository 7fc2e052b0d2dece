"""Calls on a pool of several nodes as a whole: what is removed is nowhere, whoever was away or died
meanwhile; pins hold wherever a block is; the truth is told about all copies.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import MooncakeError, Tier, Unavailable
from mooncake.base.pool_messages import LastingPin, PoolState
from mooncake.kvstore.client.broadcast import PinnedAt
from tests.support.kvstore.node_world import BLOCK, key, keys
from tests.unit.kvstore.client.test_failover import MOMENTS, RUN, TIMEOUT_S, Scene, offsets

ALL_GO_DOWN = {"ssd_min_uses": 1, "ssd_write_at": 0.0}
"""Every block is on disk a moment after it was put."""


def places(scene: Scene, number: int) -> set[tuple[str, Tier]]:
    """Return where a client is told that a block is."""
    [found] = scene.call("describe", keys(number))
    assert all(one.copy.num_bytes == BLOCK for one in found)
    assert len({(one.store.worker_id, one.copy.tier) for one in found}) == len(found)
    return {(one.store.worker_id, one.copy.tier) for one in found}


def test_what_is_removed_is_removed_from_all_nodes() -> None:
    scene = Scene(ssd_blocks=16, **ALL_GO_DOWN)
    for name in ("kv0", "kv2"):
        scene.store(name, *RUN)
    scene.store("kv1", 9)
    assert places(scene, 1) == {(n, t) for n in ("kv0", "kv2") for t in (Tier.DRAM, Tier.SSD)}
    assert scene.call("remove", keys(*RUN, 9, 77)) == [True] * 6 + [False]
    assert [places(scene, n) for n in (*RUN, 9)] == [set()] * 6
    assert scene.call("get_into", keys(*RUN), offsets(5)) == 0
    for name in list(scene.nodes):
        scene.kill(name)
        scene.boot_node(int(name[2:]))
    scene.run(TIMEOUT_S)
    assert [places(scene, n) for n in (*RUN, 9)] == [set()] * 6, "in no boot"
    scene.store("kv1", 1)
    assert places(scene, 1) == {("kv1", Tier.DRAM), ("kv1", Tier.SSD)}, "it can be put again"


@pytest.mark.parametrize("away_s", [0.0, 3.0], ids=["nobody knows that it is lost", "it is lost"])
def test_a_node_that_was_away_does_not_bring_back_what_was_removed(away_s: float) -> None:
    scene = Scene(ssd_blocks=16, **ALL_GO_DOWN)
    for name in ("kv0", "kv1"):
        scene.store(name, *RUN)
    scene.kill("kv1")
    scene.run(away_s)
    assert scene.call("remove", keys(1, 2)) == [True, True]
    scene.boot_node(1)
    scene.run(TIMEOUT_S)
    assert places(scene, 1) == places(scene, 2) == set()
    assert places(scene, 3) == {("kv0", Tier.DRAM), ("kv0", Tier.SSD), ("kv1", Tier.SSD)}
    scene.store("kv1", 1)
    scene.kill("kv1")
    scene.run(3.0)
    scene.boot_node(1)
    scene.run(TIMEOUT_S)
    assert places(scene, 1) == {("kv1", Tier.SSD)}, "what was put since is not removed"


def test_while_a_node_does_not_answer_no_block_is_reported_gone() -> None:
    scene = Scene(heartbeat_timeout_s=30.0)
    for name in ("kv0", "kv1"):
        scene.store(name, *RUN)
    scene.processes[scene.address("kv1")].hang(4 * TIMEOUT_S)
    error = scene.call("remove", keys(1))
    assert isinstance(error, Unavailable)
    assert "kv1" in error.message
    assert isinstance(scene.call("describe", keys(1)), Unavailable)
    states = scene.call("stat_all")
    assert [(s.worker_id, isinstance(state, PoolState)) for s, state in states] == [
        ("kv0", True), ("kv1", False), ("kv2", True),
    ]  # fmt: skip
    scene.run(2 * TIMEOUT_S)
    assert places(scene, 1) == set(), "it has done it since"


def test_without_a_gateway_the_nodes_of_the_pool_are_unknown() -> None:
    scene = Scene()
    scene.store("kv0", *RUN)
    scene.kill("gateway")
    pinning = ("pin", keys(1), LastingPin.HARD)
    for call in (("remove", keys(1)), pinning, ("describe", keys(1)), ("stat_all",)):
        error = scene.call(*call)
        assert isinstance(error, Unavailable)
        assert "gateway" in error.message
    assert scene.call("get_into", keys(*RUN), offsets(5)) == 5


@pytest.mark.parametrize("after_s", MOMENTS)
def test_a_reader_gets_what_it_reads_or_nothing(after_s: float) -> None:
    scene = Scene()
    scene.store("kv0", *RUN)
    reading = scene.begin("get_into", keys(*RUN), offsets(5))
    scene.heap.run_until(scene.heap.now() + after_s)
    assert scene.call("remove", keys(*RUN)) == [True] * 5
    count = scene.end(reading) if not reading else reading[0][0]
    assert scene.found(*RUN[:count])
    assert places(scene, 1) == set()
    assert all(node.quiet for node in scene.nodes.values())
    assert scene.nodes["kv0"].state().load.num_free_blocks == 32


@pytest.mark.parametrize("after_s", [0.0, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 6e-3, 8e-3])
def test_a_copy_on_its_way_does_not_bring_back_what_was_removed(after_s: float) -> None:
    scene = Scene()
    scene.store("kv0", *RUN)
    copying = scene.begin("replicate", keys(*RUN), 3)
    scene.heap.run_until(scene.heap.now() + after_s)
    assert scene.call("remove", keys(*RUN)) == [True] * 5
    assert len(copying) == 1
    scene.run(TIMEOUT_S)
    assert [places(scene, n) for n in RUN] == [set()] * 5
    assert all(node.quiet for node in scene.nodes.values())


def pins(scene: Scene, number: int) -> dict[str, LastingPin]:
    [found] = scene.call("describe", keys(number))
    return {one.store.worker_id: one.copy.pin for one in found if one.copy.tier is Tier.DRAM}


def test_pins_hold_wherever_a_block_is() -> None:
    scene = Scene()
    scene.store("kv1", 1, 2)
    scene.store("kv2", 2, 3)
    pinned = scene.call("pin", keys(1, 2, 3, 77), LastingPin.HARD)
    assert isinstance(pinned, PinnedAt)
    assert pinned.blocks == [True, True, True, False]
    assert len(pinned.epochs) == 2
    assert pins(scene, 2) == {"kv1": LastingPin.HARD, "kv2": LastingPin.HARD}
    for name in ("kv1", "kv2"):
        for first in range(100, 180, 8):
            scene.store(name, *range(first, first + 8))
    scene.memory[:] = bytes(len(scene.memory))
    assert scene.call("get_into", keys(1, 2, 3), offsets(3)) == 3
    assert scene.found(1, 2, 3)
    assert scene.call("remove", keys(1)) == [False], "a hard pin protects it"
    no_boot = scene.call("pin", keys(1, 2, 3), LastingPin.NONE, epochs=["another"])
    assert no_boot.blocks == [False] * 3
    one_boot = scene.call("pin", keys(1, 2, 3), LastingPin.NONE, epochs=pinned.epochs[:1])
    assert one_boot.epochs == pinned.epochs[:1]
    assert sorted(one_boot.blocks) == [False, True, True]
    assert scene.call("pin", keys(1, 2, 3), LastingPin.NONE).blocks == [True] * 3
    assert pins(scene, 2) == {"kv1": LastingPin.NONE, "kv2": LastingPin.NONE}


def test_what_lies_on_ssd_only_is_brought_up_by_one_node_to_be_pinned() -> None:
    scene = Scene(ssd_blocks=16, **ALL_GO_DOWN)
    for name in ("kv0", "kv2"):
        scene.store(name, 1, 2)
    scene.store("kv1", 2)
    for name in ("kv0", "kv2"):
        scene.kill(name)
        scene.boot_node(int(name[2:]))
    scene.run(TIMEOUT_S)
    assert places(scene, 1) == {("kv0", Tier.SSD), ("kv2", Tier.SSD)}
    assert scene.call("pin", keys(1, 2, 77), LastingPin.SOFT).blocks == [True, True, False]
    assert list(pins(scene, 1).values()) == [LastingPin.SOFT]
    assert pins(scene, 2) == {"kv1": LastingPin.SOFT}, "what is in DRAM somewhere need not come up"


def test_a_node_that_dies_meanwhile_is_no_excuse_for_a_pin() -> None:
    scene = Scene(heartbeat_timeout_s=30.0)
    scene.store("kv1", 1)
    scene.store("kv2", 2)
    scene.kill("kv2")
    assert scene.call("pin", keys(1), LastingPin.HARD).blocks == [True]
    assert isinstance(scene.call("pin", keys(1, 2), LastingPin.HARD), Unavailable)
    unpinned = scene.call("pin", keys(1), LastingPin.NONE)
    assert isinstance(unpinned, Unavailable), "it may be pinned at kv2 still"


def test_the_figures_of_all_nodes() -> None:
    scene = Scene()
    scene.store("kv1", *RUN)
    states = scene.call("stat_all")
    assert {s.worker_id: state.load.num_cached_blocks for s, state in states} == {
        "kv0": 0, "kv1": 5, "kv2": 0,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_what_was_removed_is_never_seen_again_whatever_happens(seed: int) -> None:
    """Puts, copies, removals, deaths in their middle and returns, at random: a removal that was
    said to be done holds in all later boots of all nodes, until somebody puts the block again.
    """
    chance = Random(seed)
    scene = Scene(ssd_blocks=12, **ALL_GO_DOWN)
    gone: set[int] = set()
    down: dict[str, float] = {}
    num_gone = 0
    for _ in range(25):
        for name, until_s in list(down.items()):
            if scene.heap.now() >= until_s:
                del down[name]
                scene.boot_node(int(name[2:]))
                scene.run(0.5)
        first = chance.randrange(12)
        numbers = range(first, first + chance.randrange(1, 5))
        deed = chance.choice(["put", "put", "remove", "replicate"])
        if deed == "put":
            gone -= set(numbers)
            ended = scene.begin("put_from", keys(*numbers), scene.fill(*numbers))
        elif deed == "remove":
            ended = scene.begin("remove", keys(*numbers))
        else:
            ended = scene.begin("replicate", keys(*numbers), 2)
        victim = chance.choice(["kv0", "kv1", "kv2"])
        if chance.random() < 0.25 and not down:
            scene.heap.run_until(scene.heap.now() + chance.random() * 8e-3)
            scene.kill(victim)
            down[victim] = scene.heap.now() + chance.random() * 12
        answer = scene.end(ended)
        if deed == "remove" and not isinstance(answer, MooncakeError):
            gone |= set(numbers)
            num_gone += sum(answer)
        assert not gone & in_dram(scene), "removed, and readable"
    for name in down:
        scene.boot_node(int(name[2:]))
    scene.run(3 * TIMEOUT_S)
    assert all(places(scene, number) == set() for number in gone)
    assert num_gone > 0


def in_dram(scene: Scene) -> set[int]:
    return {n for n in range(16) if any(node.stores(key(n)) for node in scene.nodes.values())}
