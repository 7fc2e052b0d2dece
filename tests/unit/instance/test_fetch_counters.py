"""Fetches are counted apart by place, so that the Conductor learns how fast each is."""

from mooncake.scheduler.config import SchedulerConfig
from tests.support.sim.cluster import LAYOUT, Cluster, request, specs

PROMPT = list(range(1, 60))
EAGER = SchedulerConfig(
    policy="round-robin", fetch_latency_s=0.0, local_bytes_per_s=1e12, remote_bytes_per_s=1e12
)


def test_a_fetch_from_another_node_counts_as_remote() -> None:
    cluster = Cluster(specs(2, 1), scheduler=EAGER)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    cluster.run(5)
    num_bytes = len(PROMPT) // LAYOUT.block_tokens * LAYOUT.block_bytes
    assert cluster.counter("fetch_remote_bytes") == num_bytes
    assert cluster.counter("fetch_remote_seconds") > 0
    assert cluster.counter("fetch_local_bytes") == 0
