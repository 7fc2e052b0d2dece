"""How much of agents' prompts comes from the cache, by the size of the pool:
`python -m benchmarks pool-agents`.

Agents ask, use a tool, and ask again with all that was said before. They share one description of
their tools. Simulated on Kimi-K2 with little HBM and DRAM for prefixes: with DRAM alone, with an
SSD behind it, and with a bucket behind it. Without a pool, requests go to any instance.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.paper_tables import Play
from mooncake.sim.results.plots import picture, points_plot
from mooncake.sim.results.result import SimulationResult
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine

NUM_PREFILL, NUM_DECODE = 4, 4
HBM_TOKENS = 100_000
"""Tokens in the HBM of each instance: enough for one prompt of the longest kind and its batch."""
BEHIND = 16
"""SSD or bucket, in units of the DRAM before it."""
COMMON_BLOCKS = 16
TURNS = (12, 28)
FIRST_TOKENS = (2_000, 6_000)
TOOL_TOKENS = (300, 3_000)
OUTPUT_TOKENS = (50, 750)
PAUSE_S = (5.0, 35.0)
TIERS: Mapping[str, dict[str, Any]] = {
    "DRAM": {},
    "DRAM and SSD, 6 GB/s": {"ssd_bytes_per_s": 6e9},
    "DRAM and bucket, 4 GB/s": {"object_bytes_per_s": 4e9},
    "DRAM and bucket, 1 GB/s": {"object_bytes_per_s": 1e9},
}
ANYWHERE = (("policy", "random"), ("fetch_remote", False))


def agents(num_sessions: int, per_s: float, seed: int) -> list[TraceLine]:
    """Return the requests of sessions that begin at random times, `per_s` a second."""
    draw, lines, begin_s = random.Random(seed), list[TraceLine](), 0.0
    fresh = count(COMMON_BLOCKS)
    for _ in range(num_sessions):
        begin_s += draw.expovariate(per_s)
        at_s, ids = begin_s, list(range(COMMON_BLOCKS))
        length = len(ids) * TRACE_BLOCK_TOKENS + draw.randint(*FIRST_TOKENS)
        for _ in range(draw.randint(*TURNS)):
            whole, rest = divmod(length, TRACE_BLOCK_TOKENS)
            ids += islice(fresh, whole - len(ids))
            ends = [next(fresh)] if rest else []
            output = draw.randint(*OUTPUT_TOKENS)
            lines.append(TraceLine(
                timestamp=1000 * at_s, input_length=length, output_length=output,
                hash_ids=[*ids, *ends],
            ))  # fmt: skip
            length += output + draw.randint(*TOOL_TOKENS)
            at_s += draw.uniform(*PAUSE_S)
    return sorted(lines, key=lambda line: line.timestamp)


def ideal(lines: Sequence[TraceLine]) -> float:
    """Return the share of tokens that a cache without bounds has."""
    seen: set[int] = set()
    hits = 0
    for line in lines:
        hits += sum(one in seen for one in line.hash_ids) * TRACE_BLOCK_TOKENS
        seen.update(line.hash_ids)
    return hits / sum(line.input_length for line in lines)


def play(lines: Sequence[TraceLine], pool_tokens: int, **more: Any) -> SimulationResult:
    """Simulate a cluster whose instances have so much DRAM each; 0: no pool."""
    if "ssd_bytes_per_s" in more:
        more |= {"ssd_tokens": BEHIND * pool_tokens, "ssd_min_uses": 1}
    if "object_bytes_per_s" in more:
        more |= {"object_tokens": BEHIND * pool_tokens, "object_min_uses": 1}
    return Play(
        num_prefill=NUM_PREFILL, num_decode=NUM_DECODE, model="kimi-k2-thinking",
        hardware="h200x8", scheduler=() if pool_tokens else ANYWHERE,
        more=(("hbm_tokens", HBM_TOKENS), ("pool_tokens", pool_tokens), *more.items()),
    ).result(lines)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every cluster and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pool-agents", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--per-s", type=float, default=0.1, help="sessions that begin a second")
    parser.add_argument(
        "--pool-tokens", type=int, nargs="+", default=[20_000, 60_000, 180_000],
        help="DRAM of each prefill instance's pool",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    lines = agents(args.sessions, args.per_s, args.seed)
    total = sum(line.input_length for line in lines)
    print(
        f"{len(lines)} requests of {total / len(lines):,.0f} tokens; "
        f"{ideal(lines):.1%} of tokens were asked for before"
    )
    table = Table("an instance's pool", "tokens from cache", "mean TTFT", "p90", "tokens/s")
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in TIERS}

    def row(name: str, result: SimulationResult) -> float:
        share = result.cache.hit_rate
        table.add_row(
            name, f"{share:.1%}", f"{result.ttft_s.mean:.2f} s", f"{result.ttft_s.p90:.2f} s",
            f"{total / result.duration_s:,.0f}",
        )  # fmt: skip
        return 100 * share

    row("none, any instance", play(lines, 0))
    for name, more in TIERS.items():
        for tokens in args.pool_tokens:
            share = row(f"{name}: {tokens / 1000:,.0f}k", play(lines, tokens, **more))
            points[name].append((tokens / 1000, share))
    Console().print(table)
    if args.svg:
        plot = points_plot(points, "thousand tokens of DRAM an instance", "% of tokens from cache")
        args.svg.write_text(picture(plot, list(points), x=420, y=170))
    return 0
