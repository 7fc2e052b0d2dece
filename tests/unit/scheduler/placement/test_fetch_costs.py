"""Fetches cost their bytes, their latency, the queue at the sender, and what the sender has to load
first; bandwidths are learned.
"""

import numpy as np
import pytest

from mooncake.base import BlockSource, Role, Tier
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.pools import RETRY_S, FetchCosts
from mooncake.scheduler.placement.views import InstanceView
from tests.support.scheduler.scheduling import hello

CONFIG = SchedulerConfig(
    local_bytes_per_s=1e6, remote_bytes_per_s=1e5, fetch_latency_s=0.01,
    ssd_bytes_per_s=1e5, object_bytes_per_s=1e4,
)  # fmt: skip
STORE = InstanceView.of(hello("kv0", Role.KVSTORE, block_bytes=1000))
ENGINE = InstanceView.of(hello("p0", Role.PREFILL))


def source(first: int, stop: int, tier: Tier = Tier.DRAM) -> BlockSource:
    return BlockSource(store=STORE.worker, first=first, stop=stop, tier=tier)


def fetch_s(costs: FetchCosts, tier: Tier = Tier.DRAM, *, local: bool = False) -> float:
    """Return the time to fetch ten blocks."""
    return costs.run(STORE, tier, 0, 10).fetch_s(10, local=local)


def test_bytes_latency_and_place() -> None:
    run = FetchCosts(CONFIG).run(STORE, Tier.DRAM, 5, 10)
    assert (run.first, run.stop, run.node_id, run.tier) == (5, 15, "node-kv0", Tier.DRAM)
    assert run.fetch_s(10, local=False) == pytest.approx(0.11, rel=0.01)
    assert run.fetch_s(10, local=True) == pytest.approx(0.02, rel=0.01)


def test_what_lies_below_dram_is_loaded_and_then_fetched() -> None:
    costs = FetchCosts(CONFIG)
    for tier, load_s in ((Tier.HBM, 0.0), (Tier.SSD, 0.1), (Tier.OBJECT, 1.0)):
        assert fetch_s(costs, tier) == pytest.approx(0.11 + load_s, rel=0.01), tier
        assert fetch_s(costs, tier, local=True) == pytest.approx(0.02 + load_s, rel=0.01), tier


def test_fetches_asked_before_come_first() -> None:
    costs = FetchCosts(CONFIG)
    costs.started([source(0, 50)])
    assert fetch_s(costs) == pytest.approx(0.61, rel=0.01)
    costs.ended([source(0, 50)])
    assert fetch_s(costs) == pytest.approx(0.11, rel=0.01)
    costs.check_idle()


def test_loads_wait_for_those_from_the_same_tier() -> None:
    costs = FetchCosts(CONFIG)
    asked = [source(0, 3), source(3, 8, Tier.OBJECT)]
    costs.started(asked)
    assert costs.blocks_asked(STORE.worker) == {Tier.DRAM: 3, Tier.OBJECT: 5}
    waiting_s = 8 * 0.01
    assert fetch_s(costs) == pytest.approx(0.11 + waiting_s, rel=0.01)
    assert fetch_s(costs, Tier.SSD) == pytest.approx(0.21 + waiting_s, rel=0.01)
    assert fetch_s(costs, Tier.OBJECT) == pytest.approx(1.11 + waiting_s + 0.5, rel=0.01)
    costs.ended(asked[1:])
    assert fetch_s(costs, Tier.OBJECT) == pytest.approx(1.11 + 0.03, rel=0.01)
    costs.ended(asked[:1])
    costs.check_idle()


@pytest.mark.parametrize("tier", Tier)
def test_many_stores_at_once_cost_what_each_does(tier: Tier) -> None:
    costs, numbers = FetchCosts(CONFIG), ((0, 0), (3, 5), (700, 11))
    stores = [InstanceView.of(hello(f"kv{n}", Role.KVSTORE)) for n in range(len(numbers))]
    for store, (other, same) in zip(stores, numbers, strict=True):
        costs.started([
            BlockSource(store=store.worker, first=0, stop=other, tier=Tier.DRAM),
            BlockSource(store=store.worker, first=0, stop=same, tier=tier),
        ])  # fmt: skip
    waiting = [1000.0 * (other + same) for other, same in numbers]
    loading = [1000.0 * costs.blocks_asked(store.worker)[tier] for store in stores]
    found = costs.local_fixed_s(np.array(waiting), tier, np.array(loading))
    assert found.tolist() == [costs.run(store, tier, 0, 1).local_fixed_s for store in stores]


def test_a_forgotten_fetch_is_noticed() -> None:
    costs = FetchCosts(CONFIG)
    costs.started([source(0, 5)])
    with pytest.raises(AssertionError):
        costs.check_idle()


def test_bandwidth_is_learned_from_counters_that_only_grow() -> None:
    costs = FetchCosts(CONFIG)
    for second in range(1, 30):
        counters = {"fetch_remote_bytes": 4e5 * second, "fetch_remote_seconds": float(second)}
        costs.observe(ENGINE, counters, float(second))
    run = costs.run(STORE, Tier.DRAM, 0, 10)
    assert run.remote_s_per_block == pytest.approx(1000 / 4e5, rel=0.01)
    assert run.local_s_per_block == pytest.approx(1e-3)


def read(costs: FetchCosts, tier: Tier, bytes_per_s: float, seconds: int = 30) -> None:
    """Have the pool node read from a tier for so long."""
    for second in range(1, seconds):
        counters = {
            f"{tier.value}_blocks_read": bytes_per_s / 1000 * second,
            f"{tier.value}_read_seconds": float(second),
        }
        costs.observe(STORE, counters, float(second))
    costs.forget("kv0")


@pytest.mark.parametrize(("tier", "other"), [(Tier.SSD, "object"), (Tier.OBJECT, "ssd")])
def test_the_bandwidth_of_each_tier_is_learned(tier: Tier, other: str) -> None:
    costs = FetchCosts(CONFIG)
    read(costs, tier, 2e3)
    known = costs.bytes_per_s
    assert known[f"{tier.value}_bytes_per_s"] == pytest.approx(2e3, rel=0.01)
    assert known[f"{other}_bytes_per_s"] == getattr(CONFIG, f"{other}_bytes_per_s")
    assert fetch_s(costs, tier) == pytest.approx(0.11 + 5.0, rel=0.01)


def test_a_slow_tier_is_tried_again_after_a_while_and_a_fast_one_stays_fast() -> None:
    costs = FetchCosts(CONFIG)
    read(costs, Tier.OBJECT, 1e3)
    read(costs, Tier.SSD, 1e8)
    for later_s, object_rate in ((RETRY_S - 1, 1e3), (RETRY_S + 1, 1e4)):
        costs.observe(STORE, {}, 29.0 + later_s)
        assert costs.bytes_per_s["object_bytes_per_s"] == pytest.approx(object_rate, rel=0.01)
        assert costs.bytes_per_s["ssd_bytes_per_s"] == pytest.approx(1e8, rel=0.01)


def test_a_network_that_small_fetches_have_shown_slow_is_tried_again_after_a_while() -> None:
    """Each took a long way, and next to nothing was moved."""
    costs = FetchCosts(CONFIG)
    for number in range(1, 100):
        counters = {"fetch_remote_bytes": 10.0 * number, "fetch_remote_seconds": 0.06 * number}
        costs.observe(ENGINE, counters, float(number))
    assert costs.bytes_per_s["remote_bytes_per_s"] < 1e3
    costs.observe(ENGINE, counters, 99.0 + RETRY_S - 1)
    assert costs.bytes_per_s["remote_bytes_per_s"] < 1e3
    costs.observe(ENGINE, counters, 99.0 + RETRY_S + 1)
    assert costs.bytes_per_s["remote_bytes_per_s"] == CONFIG.remote_bytes_per_s


def test_a_restarted_worker_counts_from_zero() -> None:
    costs = FetchCosts(CONFIG)
    counters = {"fetch_local_bytes": 5e7, "fetch_local_seconds": 10.0}
    costs.observe(ENGINE, counters, 0.0)
    before = costs.bytes_per_s
    costs.forget("p0")
    costs.observe(ENGINE, {"fetch_local_bytes": 0.0, "fetch_local_seconds": 0.0}, 1.0)
    assert costs.bytes_per_s == before
