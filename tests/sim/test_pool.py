"""The pool in a whole simulated cluster: what outlives the death of a pool node, and how."""

from __future__ import annotations

import pytest

from mooncake.base import AnyMessage, BlockEvents, Tier, block_keys
from mooncake.base.messages import Replicate
from mooncake.kvstore.node.node import KvNode
from mooncake.sim.world.disk import SimMedium
from mooncake.sim.world.network import Endpoint, NetworkConfig
from tests.sim.test_cluster import EAGER, PROMPT, prompts
from tests.support.kvstore.node_world import keys
from tests.support.kvstore.pool_world import PoolWorld
from tests.support.sim.cluster import LAYOUT, Cluster, engine_config, request, specs

NUM_FULL_BLOCKS = len(PROMPT) // 4


def media(cluster: Cluster) -> list[SimMedium]:
    return [medium for worker in cluster.world.workers.values() for medium in worker.media]


def kill_all(cluster: Cluster) -> None:
    """Every engine and every pool dies at once; only disks are left."""
    for worker_id in sorted(cluster.world.workers):
        cluster.world.kill(worker_id)
    cluster.run(5)


def test_a_prefix_survives_the_death_of_all_workers_through_ssd() -> None:
    cluster = Cluster(specs(1, 1), scheduler=EAGER, ssd_blocks=100)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    kill_all(cluster)
    second = cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    cluster.run(5)
    cluster.check_streams()
    assert second.finals[0].num_cached_tokens == NUM_FULL_BLOCKS * 4
    assert sum(pool.counters["ssd_blocks_found"] for pool in cluster.pools()) >= NUM_FULL_BLOCKS
    assert sum(pool.counters["ssd_blocks_read"] for pool in cluster.pools()) == NUM_FULL_BLOCKS
    cluster.check_quiet()


def test_damaged_blocks_are_recomputed_and_tokens_stay_the_same() -> None:
    cluster = Cluster(specs(1, 1), scheduler=EAGER, ssd_blocks=100)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    kill_all(cluster)
    for medium in media(cluster):
        for slot in sorted(medium.slots)[3::2]:
            medium.damage(slot)
    second = cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    cluster.run(5)
    cluster.check_streams()
    assert second.finals[0].num_cached_tokens < NUM_FULL_BLOCKS * 4
    assert sum(pool.counters["ssd_blocks_corrupt"] for pool in cluster.pools()) > 0
    cluster.check_quiet()


@pytest.mark.parametrize("fault", ["refuses_reads", "refuses_writes", "is_full"])
def test_failing_disks_cost_time_only(fault: str) -> None:
    cluster = Cluster(specs(2, 2), scheduler=EAGER, ssd_blocks=100, pool_blocks=24)
    for index, prompt in enumerate(prompts(8, seed=7, shared=21)):
        cluster.world.submit(request(f"a{index}", prompt, max_tokens=10, seed=index))
    cluster.run(5)
    for medium in media(cluster):
        setattr(medium, fault, True)
    for index, prompt in enumerate(prompts(8, seed=7, shared=21)):
        cluster.world.submit(request(f"b{index}", prompt, max_tokens=10, seed=index))
    cluster.run(30)
    cluster.check_streams()
    cluster.check_quiet()


def test_a_pool_of_little_memory_serves_long_prefixes_from_ssd() -> None:
    cluster = Cluster(
        specs(1, 1), scheduler=EAGER, pool_blocks=20, ssd_blocks=400,
        prefill=engine_config(32), decode=engine_config(64),
    )  # fmt: skip
    wanted = prompts(12, seed=8)
    for turn in range(2):
        for index, prompt in enumerate(wanted):
            cluster.world.submit(request(f"r{turn}-{index}", prompt, max_tokens=4, seed=index))
            cluster.run(2)
    cluster.check_streams()
    assert sum(pool.counters["ssd_blocks_read"] for pool in cluster.pools()) > 20
    cluster.check_quiet()


def test_a_wire_that_flips_bits_gives_no_wrong_token() -> None:
    network = NetworkConfig(encode=True, corruption=0.05)
    cluster = Cluster(specs(2, 2), scheduler=EAGER, network=network, ssd_blocks=100)
    wanted = prompts(10, seed=9, shared=30)
    for turn in range(3):
        for index, prompt in enumerate(wanted):
            cluster.world.submit(request(f"r{turn}-{index}", prompt, max_tokens=10, seed=index))
            cluster.run(0.2)
        cluster.world.kill(f"prefill-{turn % 2}")
        cluster.run(10)
    cluster.check_streams()
    assert cluster.counter("blocks_fetched_corrupt") > 0
    assert sum(pool.counters["blocks_damaged"] for pool in cluster.pools()) == 0
    cluster.check_quiet()


def test_a_prefix_comes_from_another_replica_when_its_pool_dies_in_mid_read() -> None:
    network = NetworkConfig(encode=True, link_bytes_per_s=1e5, local_bytes_per_s=1e5)
    cluster = Cluster(specs(2, 1), scheduler=EAGER, network=network, restart_s=1.0)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(20)
    keys = block_keys(LAYOUT.fingerprint, PROMPT, LAYOUT.block_tokens)
    [holder] = [name for name in pool_names(cluster) if pool(cluster, name).stores(keys[0])]
    source = pool(cluster, holder).state().store
    pool(cluster, "kvstore-decode-0").handle(
        Replicate(source=source, keys=keys), cluster.world.heap.now()
    )
    cluster.run(5)
    engines = [name for name in sorted(cluster.world.workers) if not name.startswith("kvstore")]
    for worker_id in engines:
        cluster.world.kill(worker_id)
    cluster.run(5)
    second = cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    while not (read := [name for name in pool_names(cluster) if num_reads(cluster, name)]):
        cluster.run(0.001)
    cluster.world.kill(read[0])
    cluster.run(30)
    cluster.check_streams()
    assert second.finals[0].num_cached_tokens == NUM_FULL_BLOCKS * 4
    cluster.check_quiet()


def pool_names(cluster: Cluster) -> list[str]:
    return [name for name in sorted(cluster.world.workers) if name.startswith("kvstore")]


def pool(cluster: Cluster, name: str) -> KvNode:
    machine = cluster.world.workers[name].machine
    assert isinstance(machine, KvNode)
    return machine


def num_reads(cluster: Cluster, name: str) -> int:
    """Return how many reads a pool has open."""
    return pool(cluster, name).state().load.num_running


def test_blocks_come_up_from_ssd_while_their_request_waits_its_turn() -> None:
    cluster = Cluster(specs(1, 1), scheduler=EAGER, ssd_blocks=100)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    kill_all(cluster)
    busy = cluster.world.submit(request("busy", list(range(90, 190)), max_tokens=1))
    cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    while not sum(pool.counters["ssd_blocks_read"] for pool in cluster.pools()):
        cluster.run(0.001)
        assert not busy.tokens, "the request before is computed: this one waits no more"
    cluster.run(20)
    cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
def test_the_loss_of_the_last_word_about_blocks_is_made_up_for(tier: Tier) -> None:
    """Nothing else happens at the node, so no other word shows that one is missing."""
    world = PoolWorld()
    world.start("a", 16, ssd_blocks=16, ssd_write_at=0.0, ssd_min_uses=1)
    send, lost = world.network.send, []

    def lossy(source: Endpoint, address: str, message: AnyMessage) -> None:
        is_news = isinstance(message, BlockEvents) and message.tier is tier and message.stored
        if is_news and address == "gateway" and not lost:
            lost.append(message)
        else:
            send(source, address, message)

    world.network.send = lossy
    [key] = keys(1)
    world.put("a", [key])
    world.run(5.0)
    assert lost
    known = world.gateway._conductor.replicas(key)
    assert [replica.tier for replica in known] == [Tier.DRAM, Tier.SSD]
