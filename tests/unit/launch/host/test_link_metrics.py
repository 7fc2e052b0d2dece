"""Links as Prometheus reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.launch.host.families import render
from mooncake.launch.worker.metrics import link_families
from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkStats


def samples(stats: LinkStats) -> dict[tuple[str, ...], float]:
    text = render(link_families("kv-1", stats.snapshot())).decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, sample.labels.get("peer", ""), sample.labels.get("le", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("worker") == "kv-1" and sample.labels["nic"] == "10.0.0.1"
    }


def test_every_link_has_counters_and_every_nic_a_histogram() -> None:
    stats = LinkStats("tcp")
    stats.arrived("10.0.0.1", "a", 1000, posted_s=0.0, now_s=0.0001)
    stats.arrived("10.0.0.1", "a", 3000, posted_s=1.0, now_s=31.0)
    stats.arrived("10.0.0.1", "b", 10, posted_s=0.0, now_s=0.0001)
    stats.retried("10.0.0.1", "b", 2)
    stats.failed("10.0.0.1", "b")
    found = samples(stats)
    assert found["mooncake_transfer_bytes_total", "a", ""] == 4000
    assert found["mooncake_transfer_busy_seconds_total", "a", ""] == 30.0001
    assert found["mooncake_transfer_retries_total", "b", ""] == 2
    assert found["mooncake_transfer_failures_total", "b", ""] == 1
    assert found["mooncake_transfer_failures_total", "a", ""] == 0
    buckets = {
        float(bound): value
        for (name, _, bound), value in found.items()
        if name == "mooncake_transfer_slice_seconds_bucket"
    }
    assert sorted(buckets) == [*LATENCY_BOUNDS_S, float("inf")]
    assert (buckets[5e-5], buckets[1e-4], buckets[1.0], buckets[float("inf")]) == (0, 2, 2, 3)
    assert found["mooncake_transfer_slice_seconds_count", "", ""] == 3
    assert found["mooncake_transfer_slice_seconds_sum", "", ""] == pytest.approx(30.0002)


def test_no_links_no_series() -> None:
    assert samples(LinkStats("tcp")) == {}
