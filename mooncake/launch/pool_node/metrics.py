"""Shows a pool node's state as Prometheus families and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mooncake.base.pool_messages import DrainProgress, PoolState, TenantUse
from mooncake.launch.host.families import families

GAUGES: dict[str, tuple[str, Callable[[PoolState], float]]] = {
    "dram_blocks": ("blocks that fit into DRAM", lambda of: of.load.num_total_blocks),
    "dram_blocks_free": ("DRAM blocks that are free", lambda of: of.load.num_free_blocks),
    "dram_blocks_stored": ("DRAM blocks that are complete and readable",
        lambda of: of.load.num_cached_blocks),
    "dram_blocks_pinned": ("DRAM blocks that are being read", lambda of: of.num_pinned),
    "dram_blocks_quarantined": ("DRAM blocks that lost workers may still write to",
        lambda of: of.num_quarantined),
    "dram_blocks_hard_pinned": ("DRAM blocks that are never evicted",
        lambda of: of.num_hard_pinned),
    "dram_blocks_soft_pinned": ("DRAM blocks that are evicted last", lambda of: of.num_soft_pinned),
    "dram_blocks_kept": ("DRAM blocks that stay for a time, because requests asked for it",
        lambda of: of.num_kept),
    "ssd_blocks": ("blocks that fit onto the disks", lambda of: of.num_ssd_blocks),
    "ssd_blocks_stored": ("blocks on disks that are readable", lambda of: of.num_ssd_stored),
    "object_blocks_known": ("blocks in the bucket that the node may read",
        lambda of: of.num_objects_known),
    "block_bytes": ("bytes of a block", lambda of: of.block_bytes),
    "reads_open": ("reads that peers have open", lambda of: of.load.num_running),
    "puts_open": ("puts that peers have open", lambda of: of.load.num_waiting),
    "draining": ("1 if the node drains and accepts nothing new", lambda of: int(of.draining)),
    "drained": ("1 if the process may be ended", lambda of: int(of.drained)),
    "drain_blocks_copied": ("blocks of a draining node that others have taken over",
        lambda of: _drain(of).num_copied),
    "drain_blocks_elsewhere": ("blocks of a draining node that others held already",
        lambda of: _drain(of).num_elsewhere),
    "drain_blocks_left": ("blocks of a draining node that only it holds",
        lambda of: _drain(of).num_left),
    "drain_blocks_left_on_ssd": ("blocks in drain_blocks_left that are on a disk",
        lambda of: _drain(of).num_left_on_ssd),
}  # fmt: skip
"""Name of a figure of a node -> its help text, and how its value is read."""
TENANT_GAUGES: dict[str, tuple[str, Callable[[TenantUse], float]]] = {
    "tenant_blocks": ("blocks of a tenant with a quota", lambda use: use.num_blocks),
    "tenant_quota_blocks": ("most blocks that the tenant may have", lambda use: use.max_blocks),
}
"""Name of a figure of a tenant in one tier -> its help text, and how its value is read."""


def _drain(state: PoolState) -> DrainProgress:
    return state.drain or DrainProgress(over=False)


def figures(state: PoolState) -> dict[str, float]:
    """Return the values of `GAUGES` for a node."""
    return {name: value_of(state) for name, (_, value_of) in GAUGES.items()}


def document(state: PoolState) -> dict[str, Any]:
    """Return a node's state as `mooncake pool stats --json` prints it."""
    return {
        "worker": state.store.worker_id,
        "address": state.store.address,
        "layout_fingerprint": state.layout_fingerprint,
        **figures(state),
        "draining": state.draining,
        "drained": state.drained,
        "tenants": [
            msgspec.structs.asdict(use) | {"tier": use.tier.value} for use in state.tenants
        ],
        "counters": state.load.counters,
    }


def fate(drain: DrainProgress) -> str:
    """Return in words what became of the blocks of a node that drains."""
    kinds = {
        "copied to other nodes": drain.num_copied,
        "there already": drain.num_elsewhere,
        "left on SSD": drain.num_left_on_ssd,
        "in its DRAM only": drain.num_left - drain.num_left_on_ssd,
    }
    return "blocks " + ", ".join(f"{kind}: {number}" for kind, number in kinds.items())


def node_families(state: PoolState) -> Iterator[Metric]:
    """Yield the figures of a node, of its tenants, and its counters."""
    from mooncake.kvstore.node.blocks import COUNTERS  # others read the names above alone

    worker, labels = [state.store.worker_id], ["worker"]
    yield from families(GaugeMetricFamily, "pool_", GAUGES, labels, [(worker, state)])
    tenants = [((*worker, use.tenant, use.tier.value), use) for use in state.tenants]
    labels_of_tenants = [*labels, "tenant", "tier"]
    yield from families(GaugeMetricFamily, "pool_", TENANT_GAUGES, labels_of_tenants, tenants)
    counters = {name: (text, methodcaller("get", name, 0.0)) for name, text in COUNTERS.items()}
    rows = [(worker, state.load.counters)]
    yield from families(CounterMetricFamily, "pool_", counters, labels, rows)
