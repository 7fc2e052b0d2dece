"""A client's get of a run that comes up from a disk in pieces: one call, one answer."""

from __future__ import annotations

import pytest

from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.sim.world.disk import SimDiskConfig, SimDisks, SimMedium
from tests.support.kvstore.node_world import BLOCK, LAYOUT, keys
from tests.unit.kvstore.client.test_client import NUM_PLACES, Scene

NUMBERS = list(range(1, NUM_PLACES + 1))
PLACES = [place * BLOCK for place in range(NUM_PLACES)]


class OnDisk(Scene):
    """A node with half the memory that a run takes; all of the run is on its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.kill("kv")
        channel, transfer, process, hello = self._worker("kv-2", "kvstore")
        self.medium = SimMedium()
        disks = SimDisks(self.heap, SimDiskConfig(), [self.medium], [64], LAYOUT, process.deliver)
        config = KvStoreConfig(
            dram_bytes=NUM_PLACES // 2 * BLOCK, high_watermark=1.0, ssd_min_uses=1,
            ssd_write_at=0.0, ssd_queue_bytes=2 * BLOCK, ssd_load_timeout_s=0.5,
            ssd=[SsdConfig(directory="/ssd", num_bytes=64 * BLOCK)],
        )  # fmt: skip
        self.node = KvNode(config, hello, LAYOUT, channel, transfer, "gateway", disks)
        process.start(self.node)
        self.run(15.0)
        self.fill(*range(NUM_PLACES))
        for number, offset in zip(NUMBERS, PLACES, strict=True):
            assert self.call("put_from", keys(number), [offset]) == keys(number)
        self.memory[:] = bytes(len(self.memory))

    def num_right(self) -> int:
        """Return how many places, from the first on, hold what was put from there."""
        right = [self.at(place) == bytes([place + 1]) * BLOCK for place in range(NUM_PLACES)]
        return [*right, False].index(False)


@pytest.fixture
def scene() -> OnDisk:
    return OnDisk()


def test_a_run_longer_than_a_nodes_memory_is_got_whole(scene: OnDisk) -> None:
    assert scene.call("get_into", keys(*NUMBERS), PLACES) == NUM_PLACES
    assert scene.num_right() == NUM_PLACES
    assert scene.node.counters["pins"] > 1
    assert scene.node.num_open == 0


def test_what_came_before_a_damaged_block_counts(scene: OnDisk) -> None:
    [slot] = [slot for slot, kept in scene.medium.slots.items() if kept.key == keys(3)[0]]
    scene.medium.damage(slot)
    assert scene.call("get_into", keys(*NUMBERS), PLACES) == 2
    assert scene.num_right() >= 2
    assert scene.node.num_open == 0


def test_what_came_before_a_node_was_lost_counts(scene: OnDisk) -> None:
    scene.begin(lambda at: scene.get_into(at, keys(*NUMBERS), PLACES))
    before = len(scene.answers)
    scene.processes["client"].wake(scene.heap.now())
    while scene.node.counters["pins"] < 2:
        scene.heap.step()
    scene.kill("kv-2")
    scene.run(20.0)
    [answer] = scene.answers[before:]
    assert isinstance(answer, int)
    assert 1 <= answer < NUM_PLACES
    assert scene.num_right() >= answer
