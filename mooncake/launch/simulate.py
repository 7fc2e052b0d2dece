"""`mooncake simulate`, `mooncake plan` and `mooncake trace`: words of the command line.

What they do is in `simulation_runs`, imported when they are run.
"""

from __future__ import annotations

import argparse
from typing import Any

from mooncake.launch.bench import AddCommand
from mooncake.scheduler.config import POLICIES

ENGINES = ("mooncake", "coupled", "coupled-prefix", "coupled-chunked")
EVICTIONS = ("lru", "lfu", "length-aware", "cost-aware")
NAMES = "a name in configs/{}, or a JSON file of the same form"

SIMULATE_EXAMPLES = """examples:
  mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 --prefill 8 --decode 8
  mooncake simulate --trace trace.jsonl --model kimi-k2-thinking --hardware h200x8 \\
      --prefill 2 --decode 2 --speed 2 --slo-ttft-s 10 --slo-tbt-ms 50 --report run.html
  mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 \\
      --engine coupled-prefix --decode 16      engines that do everything, as a baseline
  mooncake simulate --faults random --seed 7   a small cluster under faults, checked
"""
PLAN_EXAMPLES = """examples:
  mooncake plan --trace trace.jsonl --model llama3-70b --hardware a800x8 \\
      --slo-ttft-s 30 --slo-tbt-ms 100
"""
TRACE_EXAMPLES = """examples:
  mooncake trace describe trace.jsonl
  mooncake trace cache trace.jsonl --policy lru --capacity 1000,10000,50000 --json rates.json
"""


def add(commands: Any, command: AddCommand) -> None:
    """Add `simulate`, `plan` and `trace` to the command line."""
    _add_simulate(
        command(commands, "simulate", "play a trace, or faults, on a simulated cluster", _simulate,
                SIMULATE_EXAMPLES)
    )  # fmt: skip
    _add_plan(
        command(commands, "plan", "the smallest cluster for a trace and limits", _plan,
                PLAN_EXAMPLES)
    )  # fmt: skip
    _add_trace_commands(
        command(commands, "trace", "look at a trace", None, TRACE_EXAMPLES), command
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.simulate(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.plan(arguments)


def _describe(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.trace_describe(arguments)


def _cache(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.trace_cache(arguments)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser, required=False)
    parser.add_argument("--prefill", type=int, default=None, metavar="N", help="prefill instances")
    parser.add_argument("--decode", type=int, default=None, metavar="N", help="decode instances")
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0],
        help="a baseline instead: coupled engines, --decode of them (default: mooncake)",
    )  # fmt: skip
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="prefill choice")
    parser.add_argument(
        "--local-caches", action="store_true", help="no instance fetches from another node's pool"
    )
    parser.add_argument(
        "--reject", action="store_true", help="refuse what would miss the limits, instead of late"
    )
    parser.add_argument(
        "--pool-tokens", type=int, default=3_000_000, metavar="N",
        help="DRAM pool of each prefill instance (default: 3000000)",
    )  # fmt: skip
    parser.add_argument("--link-gbps", type=float, metavar="X", help="network of each instance")
    parser.add_argument(
        "--max-output", type=int, metavar="N", help="cut recorded outputs to N tokens"
    )
    parser.add_argument("--report", metavar="OUT.html", help="write a page with plots")
    parser.add_argument(
        "--faults", choices=("random",), help="play a random schedule of faults instead of a trace"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser, required=True)
    parser.add_argument(
        "--max-nodes", type=int, default=128, metavar="N", help="largest cluster (default: 128)"
    )
    parser.add_argument("--report", metavar="OUT.html", help="write a page of what was tried")


def _add_trace_commands(trace: argparse.ArgumentParser, command: AddCommand) -> None:
    kinds = trace.add_subparsers(title="commands", required=True, metavar="COMMAND")
    facts = command(kinds, "describe", "what a trace is like", _describe, TRACE_EXAMPLES)
    facts.add_argument("file", metavar="FILE")
    cache = command(
        kinds, "cache", "what one pool of a given size would hit", _cache, TRACE_EXAMPLES
    )
    cache.add_argument("file", metavar="FILE")
    cache.add_argument("--policy", choices=EVICTIONS, default="lru")
    cache.add_argument(
        "--capacity", default="1000,10000,30000,50000,100000", metavar="N,...",
        help="blocks of 512 tokens",
    )  # fmt: skip
    cache.add_argument("--json", metavar="OUT", help="write the list here")


def _add_trace(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--trace", required=required, metavar="FILE", help="JSONL, see the README")
    parser.add_argument("--trace-format", choices=("mooncake",), default="mooncake")
    parser.add_argument("--model", default="llama3-70b", metavar="M", help=NAMES.format("models"))
    parser.add_argument("--hardware", default="a800x8", metavar="H", help=NAMES.format("hardware"))
    parser.add_argument(
        "--slo-ttft-s", type=float, default=30.0, metavar="S", help="limit (default: 30)"
    )
    parser.add_argument(
        "--slo-tbt-ms", type=float, default=100.0, metavar="MS",
        help="limit on the mean of the slowest tenth of gaps (default: 100)",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="replay X times faster"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", metavar="OUT", help="write all figures here")
