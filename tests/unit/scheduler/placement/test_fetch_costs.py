"""Fetches cost their bytes, their latency and the queue at the sender; bandwidth is learned."""

import pytest

from mooncake.base import BlockSource, Role
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.pools import FetchCosts
from mooncake.scheduler.placement.views import InstanceView
from tests.support.scheduler.scheduling import hello

CONFIG = SchedulerConfig(local_bytes_per_s=1e6, remote_bytes_per_s=1e5, fetch_latency_s=0.01)
STORE = InstanceView.of(hello("kv0", Role.KVSTORE, block_bytes=1000))


def source(first: int, stop: int) -> BlockSource:
    return BlockSource(store=STORE.worker, first=first, stop=stop)


def test_bytes_latency_and_place() -> None:
    run = FetchCosts(CONFIG).run(STORE, 5, 10)
    assert (run.first, run.stop, run.node_id) == (5, 15, "node-kv0")
    assert run.fetch_s(10, local=False) == pytest.approx(0.11, rel=0.01)
    assert run.fetch_s(10, local=True) == pytest.approx(0.02, rel=0.01)


def test_fetches_asked_before_come_first() -> None:
    costs = FetchCosts(CONFIG)
    costs.started([source(0, 50)])
    assert costs.run(STORE, 0, 10).fetch_s(10, local=False) == pytest.approx(0.61, rel=0.01)
    costs.ended([source(0, 50)])
    assert costs.run(STORE, 0, 10).fetch_s(10, local=False) == pytest.approx(0.11, rel=0.01)
    costs.check_idle()


def test_a_forgotten_fetch_is_noticed() -> None:
    costs = FetchCosts(CONFIG)
    costs.started([source(0, 5)])
    with pytest.raises(AssertionError):
        costs.check_idle()


def test_bandwidth_is_learned_from_counters_that_only_grow() -> None:
    costs = FetchCosts(CONFIG)
    for second in range(1, 30):
        costs.observe(
            "p0", {"fetch_remote_bytes": 4e5 * second, "fetch_remote_seconds": float(second)}
        )
    assert costs.run(STORE, 0, 10).remote_s_per_block == pytest.approx(1000 / 4e5, rel=0.01)
    assert costs.run(STORE, 0, 10).local_s_per_block == pytest.approx(1e-3)


def test_a_restarted_worker_counts_from_zero() -> None:
    costs = FetchCosts(CONFIG)
    counters = {"fetch_local_bytes": 5e7, "fetch_local_seconds": 10.0}
    costs.observe("p0", counters)
    before = costs.run(STORE, 0, 1).local_s_per_block
    costs.forget("p0")
    costs.observe("p0", {"fetch_local_bytes": 0.0, "fetch_local_seconds": 0.0})
    assert costs.run(STORE, 0, 1).local_s_per_block == before
