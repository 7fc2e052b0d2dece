"""Random clusters under random load, aborts and deaths: one final event each, the oracle's tokens,
nothing left.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.instance.config import InstanceConfig
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.world.network import NetworkConfig
from tests.support.examples import examples
from tests.support.sim.cluster import Cluster, engine_config, request, specs

NUM_SEEDS = examples(60)


def random_cluster(random: Random, seed: int) -> Cluster:
    num_prefill, num_decode = random.randrange(0, 4), random.randrange(1, 4)
    return Cluster(
        specs(num_prefill, num_decode, kvstores=random.random() < 0.8),
        prefill=engine_config(random.choice([48, 128]), max_chunk_tokens=random.randrange(1, 24)),
        decode=engine_config(random.choice([40, 128]), max_chunk_tokens=random.randrange(1, 24)),
        scheduler=SchedulerConfig(
            policy=random.choice(["kvcache-centric", "load-balance", "random"]),
            fetch_latency_s=random.choice([0.0, 0.002]),
            remote_bytes_per_s=random.choice([1e9, 1e12]),
            max_attempts=50,
            replace_wait_s=60.0,
            whole_on_decode_max_tokens=random.choice([0, 16]),
        ),
        network=NetworkConfig(
            encode=True,
            questions=True,
            message_jitter_s=random.choice([0.0, 0.001, 0.02]),
            link_bytes_per_s=random.choice([1e4, 1e6, 50e9]),
        ),
        instance=InstanceConfig(
            quarantine_s=1.0, push_timeout_s=5.0, hold_s=random.choice([0.02, 0.3, 10.0])
        ),
        pool_blocks=random.choice([16, 64, 256]),
        ssd_blocks=random.choice([0, 8, 200]),
        restart_s=random.choice([0.2, 1.0, 4.0]),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_nothing_is_lost_whatever_dies(seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, seed)
    heads = [[random.randrange(97) for _ in range(random.randrange(60))] for _ in range(3)]
    for index in range(random.randrange(5, 40)):
        prompt = random.choice(heads) + [
            random.randrange(97) for _ in range(random.randrange(1, 40))
        ]
        max_tokens = random.choice([1, 2, 20, 60])
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=max_tokens, seed=index))
        cluster.run(random.choice([0.0, 0.003, 0.05, 0.2]))
        if random.random() < 0.1:
            cluster.world.abort(f"r{random.randrange(index + 1)}")
        if random.random() < 0.15:
            cluster.world.kill(random.choice(sorted(cluster.world.workers)))
        cluster.check_integrity()
    cluster.settle(300)
    cluster.check_streams(may_refuse=True)
    cluster.check_quiet()
