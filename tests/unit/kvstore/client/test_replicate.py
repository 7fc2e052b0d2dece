"""Copies that a client of the pool wishes for: so many, on nodes that live, and told of truly."""

from __future__ import annotations

import pytest

from mooncake.base import Drain
from tests.support.kvstore.node_world import keys
from tests.unit.kvstore.client.test_failover import RUN, Scene, offsets


def holders(scene: Scene) -> set[str]:
    return {
        name for name, node in scene.nodes.items() if all(node.stores(key) for key in keys(*RUN))
    }


def test_a_run_lies_on_as_many_nodes_as_are_wanted() -> None:
    scene = Scene(num_nodes=4)
    assert scene.call("put_from", keys(*RUN), scene.fill(*RUN)) == keys(*RUN)
    assert scene.call("replicate", keys(*RUN), 3) == 3
    assert len(holders(scene)) == 3
    assert scene.call("replicate", keys(*RUN), 2) == 3, "there are enough"
    assert scene.call("replicate", keys(*RUN), 9) == 4, "there are no more nodes"
    scene.kill("kv0")
    scene.memory[:] = bytes(len(scene.memory))
    assert scene.call("get_into", keys(*RUN), offsets(5)) == 5
    assert scene.found(*RUN)
    for node in scene.nodes.values():
        assert node.quiet
        assert node.counters["blocks_replicated"] == 5


def test_a_part_of_a_run_is_completed_and_does_not_count_before() -> None:
    scene = Scene()
    scene.store("kv1", *RUN)
    scene.store("kv2", *RUN[:2])
    assert scene.call("replicate", keys(*RUN), 2) == 2
    assert len(holders(scene)) == 2


def test_a_run_that_no_node_holds_whole_is_not_copied() -> None:
    scene = Scene()
    assert scene.call("replicate", keys(77), 2) == 0
    scene.store("kv1", 1)
    scene.store("kv2", 2)
    assert scene.call("replicate", keys(1, 2), 2) == 0


def test_a_node_that_cannot_take_a_copy_is_passed_over() -> None:
    scene = Scene()
    scene.store("kv0", *RUN)
    scene.nodes["kv1"].handle(Drain(), scene.heap.now())
    assert scene.call("replicate", keys(*RUN), 2) == 2
    assert holders(scene) == {"kv0", "kv2"}
    assert scene.call("replicate", keys(*RUN), 3) == 2


@pytest.mark.parametrize("after_s", [0.0, 5e-4, 2e-3, 4e-3])
def test_nodes_that_die_or_hang_meanwhile_do_not_hold_it_up(after_s: float) -> None:
    scene = Scene(num_nodes=5, heartbeat_timeout_s=30.0)
    scene.store("kv0", *RUN)
    scene.processes[scene.address("kv1")].hang(60.0)
    ended = scene.begin("replicate", keys(*RUN), 3)
    scene.heap.run_until(scene.heap.now() + after_s)
    scene.kill("kv3")
    count = scene.end(ended)
    assert count in (len(holders(scene)), len(holders(scene)) + 1), "one may have died since"
    assert count >= 2


def test_it_works_without_a_gateway() -> None:
    scene = Scene()
    scene.store("kv0", *RUN)
    scene.kill("gateway")
    assert scene.call("replicate", keys(*RUN), 2) == 2
    assert len(holders(scene)) == 2
