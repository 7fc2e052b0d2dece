"""Workers that are cut off, hang or lose their node while real bytes move: whoever is given up may
still be writing, and no page is used again before that is over. Wrong KV gives wrong tokens.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.instance.config import InstanceConfig
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.world.network import NetworkConfig
from tests.support.examples import examples
from tests.support.sim.cluster import Cluster, engine_config, request, specs

NUM_SEEDS = examples(40)
PUSH_TIMEOUT_S = 3.0


def cluster_of(random: Random, seed: int) -> Cluster:
    return Cluster(
        specs(random.randrange(1, 4), random.randrange(1, 4)),
        prefill=engine_config(random.choice([48, 128]), max_chunk_tokens=random.randrange(4, 24)),
        decode=engine_config(random.choice([40, 64]), max_chunk_tokens=random.randrange(4, 24)),
        scheduler=SchedulerConfig(
            max_attempts=50, replace_wait_s=60.0, heartbeat_timeout_s=1.0, stall_timeout_s=10.0
        ),
        network=NetworkConfig(
            encode=True, message_jitter_s=0.002, link_bytes_per_s=random.choice([3e3, 1e5, 1e9])
        ),
        instance=InstanceConfig(
            quarantine_s=PUSH_TIMEOUT_S + 1.0, push_timeout_s=PUSH_TIMEOUT_S, ask_again_s=2.0
        ),
        pool_blocks=random.choice([32, 128]),
        seed=seed,
    )


def disturb(random: Random, cluster: Cluster) -> None:
    world = cluster.world
    names = sorted(world.workers)
    nodes = sorted({worker.spec.node_id for worker in world.workers.values()})
    seconds = random.choice([0.05, 0.5, 1.6, 3.0])
    match random.randrange(4):
        case 0:
            world.hang(random.choice(names), seconds)
        case 1:
            world.kill(random.choice(names), noticed=random.random() < 0.5)
        case _:
            here, there = random.choice(nodes), random.choice([*nodes, "gateway"])
            world.network.partition(here, there, cut=True)
            world.heap.after(seconds, lambda: world.network.partition(here, there, cut=False))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_byte_is_wrong_when_any_worker_is_cut_off(seed: int) -> None:
    random = Random(seed)
    cluster = cluster_of(random, seed)
    heads = [[random.randrange(97) for _ in range(random.randrange(60))] for _ in range(3)]
    for index in range(random.randrange(8, 24)):
        prompt = random.choice(heads) + [
            random.randrange(97) for _ in range(random.randrange(1, 40))
        ]
        cluster.world.submit(
            request(f"r{index}", prompt, max_tokens=random.choice([1, 12, 40]), seed=index)
        )
        cluster.run(random.choice([0.0, 0.01, 0.2]))
        if random.random() < 0.4:
            disturb(random, cluster)
        cluster.check_integrity()
    cluster.settle(200)
    cluster.check_streams(may_refuse=True)
    cluster.check_quiet()


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_an_engine_that_was_cut_off_ends_its_requests_and_comes_back(worker_id: str) -> None:
    """It is not killed: in life it keeps its weights. The answers are right nevertheless."""
    cluster = cluster_of(Random(1), 1)
    worker = cluster.world.workers[worker_id]
    for index in range(6):
        prompt = [(index + at) % 97 for at in range(60)]
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=40, seed=index))
    cluster.run(0.1)
    place = worker.spec.node_id
    cluster.world.network.partition(place, "gateway", cut=True)
    cluster.run(3.0)
    assert worker.num_starts == 1
    cluster.world.network.partition(place, "gateway", cut=False)
    cluster.settle(200)
    assert (worker.num_starts, len(worker.former)) == (2, 1), "it left by itself"
    cluster.check_streams(may_refuse=False)
    cluster.check_quiet()
