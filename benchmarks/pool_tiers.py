"""What a disk behind a small pool is worth: `python -m benchmarks pool-tiers --trace FILE`.

The trace's first requests, simulated on Kimi-K2 with little HBM and DRAM for its prefixes: without
an SSD, with one, and with ten times the DRAM instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.paper_tables import CUT, SHORT, Play
from mooncake.sim.files import read_trace

HBM_TOKENS = 400_000
POOL_TOKENS = 800_000
SSD_TOKENS = 20_000_000
SSD_BYTES_PER_S = 6e9

CLUSTERS: Mapping[str, dict[str, Any]] = {
    "no SSD": {"pool_tokens": POOL_TOKENS},
    "SSD": {"pool_tokens": POOL_TOKENS, "ssd_tokens": SSD_TOKENS},
    "ten times the DRAM": {"pool_tokens": 10 * POOL_TOKENS},
}


def main(argv: list[str] | None = None) -> int:
    """Simulate every cluster and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--limit", type=int, default=SHORT, help="requests of the trace")
    arguments = parser.parse_args(argv)
    trace = read_trace(arguments.trace)
    table = Table("each node's pool", "hit rate", "HBM", "own pool", "others", "mean TTFT", "p90")
    for name, more in CLUSTERS.items():
        settings = {"hbm_tokens": HBM_TOKENS, "ssd_bytes_per_s": SSD_BYTES_PER_S, **more}
        result = Play(
            num_prefill=4, num_decode=2, model="kimi-k2-thinking", hardware="h200x8",
            limit=arguments.limit, max_output=CUT, more=tuple(settings.items()),
        ).result(trace)  # fmt: skip
        cache = result.cache
        parts = (f"{tokens / cache.total_tokens:.3f}" for tokens in cache.by_tier.values())
        table.add_row(
            name, f"{cache.hit_rate:.3f}", *parts, f"{result.ttft_s.mean:.3f} s",
            f"{result.ttft_s.p90:.3f} s",
        )  # fmt: skip
    Console().print(table)
    return 0
