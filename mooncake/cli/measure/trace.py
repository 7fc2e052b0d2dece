"""`mooncake trace describe|cache` prints figures of a trace, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from mooncake.cli.command import Command
from mooncake.cli.results import as_json, write
from mooncake.launch.config.sim_settings import CacheSettings, TraceFile
from mooncake.sim.files import read_trace
from mooncake.sim.trace_cache import hit_rate
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, describe
from mooncake.telemetry.terminal import show_rows


def run_describe(wanted: TraceFile) -> int:
    """Print how long a trace is, how its lengths are distributed and how often its blocks come
    again.
    """
    facts = describe(read_trace(wanted.file))
    write(wanted.json, as_json(facts))
    rows = [
        ["", ""],
        ["requests", f"{facts.num_requests:,}"],
        ["from first to last", f"{facts.duration_s:,.0f} s ({facts.requests_per_s:.2f} a second)"],
        ["prompt tokens", _spread(facts.input_tokens)],
        ["output tokens", _spread(facts.output_tokens)],
        [f"blocks of {TRACE_BLOCK_TOKENS} tokens", f"{facts.num_block_refs:,}"],
        ["different ones", f"{facts.num_unique_blocks:,}, {facts.used_once_ratio:.1%} used once"],
        ["hit rate of a cache without bound", f"{facts.max_hit_rate:.1%}"],
    ]
    show_rows(wanted.file, rows, Console())
    return 0


def run_cache(wanted: CacheSettings) -> int:
    """Print the hit rate of one pool of each capacity."""
    trace = read_trace(wanted.file)
    rates = [hit_rate(trace, wanted.policy, capacity) for capacity in wanted.capacity]
    write(wanted.json, as_json(rates))
    rows = [["blocks", "hit rate"], *([f"{r.capacity:,}", f"{r.hit_rate:.1%}"] for r in rates)]
    show_rows(f"{wanted.policy}, one pool", rows, Console())
    return 0


def _spread(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in spread.items())


COMMANDS = (
    Command(
        words="trace describe", summary="describe the requests of a trace", settings=TraceFile,
        run=run_describe, examples="mooncake trace describe trace.jsonl",
    ),
    Command(
        words="trace cache", summary="print what one pool of a given size would hit",
        settings=CacheSettings, run=run_cache,
        examples="mooncake trace cache trace.jsonl --policy lru --capacity 1000,10000,50000 "
        "--json rates.json",
    ),
)  # fmt: skip
