"""Renders the figures of a pool's nodes, and the copies of some blocks, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mooncake.base import BlockKey, MooncakeError, WorkerRef, format_bytes
from mooncake.base.pool_messages import LastingPin, PoolState
from mooncake.kvstore.client.broadcast import Replica
from mooncake.launch.pool_node import metrics as pool_metrics

States = Sequence[tuple[WorkerRef, PoolState | MooncakeError]]
_ALIKE = ("block_bytes", "draining", "drained")
"""Figures that are not added up over nodes."""


def pool_document(states: States) -> dict[str, Any]:
    """Return the figures of all nodes and their sums, as `mooncake pool stats --all --json` prints
    them.
    """
    nodes: list[dict[str, Any]] = []
    total: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for store, state in states:
        if isinstance(state, MooncakeError):
            about = {"worker": store.worker_id, "address": store.address}
            nodes.append({**about, "error": state.message})
            continue
        nodes.append(pool_metrics.document(state))
        figures = pool_metrics.figures(state)
        total.update({name: n for name, n in figures.items() if name not in _ALIKE})
        counters.update(state.load.counters)
    silent = sum("error" in node for node in nodes)
    sums = {"nodes": len(nodes), "nodes_silent": silent, **total, "counters": dict(counters)}
    return {"total": sums, "nodes": nodes}


def pool_text(shown: dict[str, Any]) -> str:
    """Return a `pool_document` as a table with a line for each node and for the sums."""
    lines = [f"{'node':<24} {'DRAM used':>21} {'SSD used':>21} {'pinned':>7} {'reads':>6}  state"]
    for node in shown["nodes"]:
        if "error" in node:
            lines.append(f"{node['worker']:<24} {node['error']}")
            continue
        size = int(node["block_bytes"])
        state = "drained" if node["drained"] else "draining" if node["draining"] else "ok"
        lines.append(f"{node['worker']:<24} {_line(node, size)}  {state}")
    sizes = {int(node["block_bytes"]) for node in shown["nodes"] if "error" not in node}
    if sizes:
        lines.append(f"{'all':<24} {_line(shown['total'], max(sizes))}")
    return "\n".join(lines)


def _line(figures: dict[str, Any], block_bytes: int) -> str:
    def used(tier: str) -> str:
        stored = format_bytes(int(figures[f"{tier}_blocks_stored"]) * block_bytes)
        return f"{stored} of {format_bytes(int(figures[f'{tier}_blocks']) * block_bytes)}"

    pinned = figures["dram_blocks_hard_pinned"] + figures["dram_blocks_soft_pinned"]
    return f"{used('dram'):>21} {used('ssd'):>21} {pinned:>7} {figures['reads_open']:>6}"


def replica_document(keys: Sequence[BlockKey], replicas: list[list[Replica]]) -> dict[str, Any]:
    """Return where blocks are, as `mooncake pool where --json` prints it."""
    blocks = [
        {
            "block": key.hex(),
            "replicas": [
                {
                    "worker": one.store.worker_id,
                    "address": one.store.address,
                    "tier": one.copy.tier.value,
                    "num_bytes": one.copy.num_bytes,
                    "pinned": one.copy.pin.value,
                    "num_readers": one.copy.num_readers,
                }
                for one in found
            ],
        }
        for key, found in zip(keys, replicas, strict=True)
    ]
    return {"num_blocks": len(keys), "num_missing": replicas.count([]), "blocks": blocks}


def replica_text(replicas: list[list[Replica]]) -> str:
    """Return where the blocks of one value are, with a line for each node and tier."""
    found = [one for each in replicas for one in each]
    places = dict.fromkeys((one.store.worker_id, one.copy.tier) for one in found)
    lines = []
    for worker_id, tier in places:
        here = [o.copy for o in found if (o.store.worker_id, o.copy.tier) == (worker_id, tier)]
        pinned = Counter(copy.pin for copy in here)
        shown = [pin for pin in (LastingPin.HARD, LastingPin.SOFT) if pinned[pin]]
        pins = [f"{pinned[pin]} {pin.value}" for pin in shown]
        size = format_bytes(sum(copy.num_bytes for copy in here))
        lines.append(
            f"{worker_id:<24} {tier.value:<5} {len(here)} of {len(replicas)} blocks, {size}"
            + (f", pinned: {' and '.join(pins)}" if pins else "")
        )
    return "\n".join(lines) or "nowhere"
