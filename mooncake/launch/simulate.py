"""`mooncake simulate`, `mooncake plan` and `mooncake trace`: words of the command line.

What they do is in `simulation_runs`, imported when they are run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from mooncake.base import ConfigError
from mooncake.launch.bench import AddCommand
from mooncake.launch.options import nearest
from mooncake.scheduler.config import POLICIES
from mooncake.sim.fault_plan import KINDS

ENGINES = ("mooncake", "coupled", "coupled-prefix", "coupled-chunked")
EVICTIONS = ("lru", "lfu", "length-aware", "cost-aware")
NAMES = "a name in mooncake/configs/{}, or a JSON file of the same form"

TRACE = (
    "JSONL of timestamp (ms), input_length, output_length and hash_ids (a name for each 512 tokens "
    "of the prompt; equal leading ids are a shared prefix)"
)

SIMULATE_EXAMPLES = """examples:
  mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 --prefill 8 --decode 8
  mooncake simulate --trace trace.jsonl --model kimi-k2-thinking --hardware h200x8 \\
      --prefill 2 --decode 2 --speed 2 --slo-ttft-s 10 --slo-tbt-ms 50 --report run.html
  mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 \\
      --engine coupled-prefix --decode 16      engines that do everything, as a baseline
  mooncake simulate --config run.yaml --seed 2   keys are the flags' names; flags come first
  mooncake simulate --faults random --seed 7     a small cluster under faults, checked
  mooncake simulate --faults faults.yaml --trace trace.jsonl --limit 300 --prefill 2 --decode 2

A file of faults is a YAML list or JSONL, each with at_s (seconds after the first request), kind and
what the kind needs; without --trace they happen to the small cluster of --seed:
  - {at_s: 10, kind: kill, target: prefill-0}
  - {at_s: 12, kind: cut, target: decode-node-0, other: prefill-node-1, seconds: 5}
  - {at_s: 20, kind: lose, amount: 0.1, seconds: 3}
kinds:
""" + "\n".join(f"  {kind:15} {what}" for kind, what in KINDS.items())
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


class Words:
    """Flags of a command that a file of settings may give as well: the file's over the defaults,
    the command line's over both.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._known: dict[str, dict[str, Any]] = {}
        parser.add_argument(
            "--config", metavar="FILE", help="YAML of these settings, keys are the flags' names"
        )
        parser.set_defaults(words=self)

    def add(self, flag: str, *, default: Any = None, required: bool = False, **more: Any) -> None:
        """Add a flag as `ArgumentParser.add_argument` does."""
        name = flag.removeprefix("--").replace("-", "_")
        self._known[name] = {**more, "default": default, "required": required}
        self._parser.add_argument(flag, default=argparse.SUPPRESS, **more)

    def resolve(self, arguments: argparse.Namespace) -> argparse.Namespace:
        """Return all settings.

        Raises:
            ConfigError: the file cannot be read or says what no flag could; a setting is missing.
        """
        values = {name: known["default"] for name, known in self._known.items()}
        if arguments.config is not None:
            values |= self._of_file(arguments.config)
        values |= {name: value for name, value in vars(arguments).items() if name in self._known}
        for name, known in self._known.items():
            if known["required"] and values[name] is None:
                raise ConfigError(f"{flag_of(name)} is missing", param=name)
        return argparse.Namespace(**values)

    def _of_file(self, path: str) -> dict[str, Any]:
        values = {}
        for key, value in read_mapping(path).items():
            name = str(key).replace("-", "_")
            if name not in self._known:
                raise ConfigError(
                    f"{path}: unknown setting {key}{nearest(name, set(self._known))}", param=name
                )
            values[name] = self._read(path, name, value)
        return values

    def _read(self, path: str, name: str, value: Any) -> Any:
        known = self._known[name]
        if known.get("action") == "store_true":
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {name}: {value!r} is neither true nor false")
            return value
        try:
            read = known.get("type", str)(value)
        except (TypeError, ValueError):
            kind = known["type"].__name__
            raise ConfigError(f"{path}: {name}: {value!r} is no {kind}", param=name) from None
        if read not in known.get("choices", (read,)):
            choices = ", ".join(known["choices"])
            raise ConfigError(f"{path}: {name}: {value!r} is none of {choices}", param=name)
        return read


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def read_mapping(path: str) -> dict[Any, Any]:
    """Return the `name: value` lines of a YAML file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}", param="config") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold `name: value` lines", param="config")
    return loaded


def _simulate(arguments: argparse.Namespace) -> int:
    from mooncake.launch import fault_runs, simulation_runs

    settings = arguments.words.resolve(arguments)
    if settings.faults is not None:
        return fault_runs.simulate_faults(settings)
    return simulation_runs.simulate(settings)


def _plan(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.plan(arguments.words.resolve(arguments))


def _describe(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.trace_describe(arguments)


def _cache(arguments: argparse.Namespace) -> int:
    from mooncake.launch import simulation_runs

    return simulation_runs.trace_cache(arguments)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    words = Words(parser)
    _add_trace(words, required=False)
    words.add("--prefill", type=int, default=None, metavar="N", help="prefill instances")
    words.add("--decode", type=int, default=None, metavar="N", help="decode instances")
    words.add(
        "--engine", choices=ENGINES, default=ENGINES[0],
        help="a baseline instead: coupled engines, --decode of them (default: mooncake)",
    )  # fmt: skip
    words.add("--policy", choices=POLICIES, default=POLICIES[0], help="prefill choice")
    words.add(
        "--local-caches", action="store_true", help="no instance fetches from another node's pool"
    )
    words.add(
        "--reject", action="store_true", help="refuse what would miss the limits, instead of late"
    )
    words.add(
        "--role-switching", action="store_true",
        help="instances change between prefill and decode when the load moves for long",
    )  # fmt: skip
    words.add(
        "--pool-tokens", type=int, default=3_000_000, metavar="N",
        help="DRAM pool of each prefill instance (default: 3000000)",
    )  # fmt: skip
    words.add("--link-gbps", type=float, metavar="X", help="network of each instance")
    words.add("--max-output", type=int, metavar="N", help="cut recorded outputs to N tokens")
    words.add("--report", metavar="OUT.html", help="write a page with plots")
    words.add(
        "--faults", metavar="FILE|random",
        help="let faults happen and check every machine after each event",
    )  # fmt: skip


def _add_plan(parser: argparse.ArgumentParser) -> None:
    words = Words(parser)
    _add_trace(words, required=True)
    words.add(
        "--max-nodes", type=int, default=128, metavar="N", help="largest cluster (default: 128)"
    )
    words.add("--report", metavar="OUT.html", help="write a page of what was tried")


def _add_trace_commands(trace: argparse.ArgumentParser, command: AddCommand) -> None:
    kinds = trace.add_subparsers(title="commands", required=True, metavar="COMMAND")
    facts = command(kinds, "describe", "what a trace is like", _describe, TRACE_EXAMPLES)
    facts.add_argument("file", metavar="FILE", help=TRACE)
    facts.add_argument("--json", metavar="OUT", help="write the facts here")
    cache = command(
        kinds, "cache", "what one pool of a given size would hit", _cache, TRACE_EXAMPLES
    )
    cache.add_argument("file", metavar="FILE", help=TRACE)
    cache.add_argument("--policy", choices=EVICTIONS, default="lru")
    cache.add_argument(
        "--capacity", default="1000,10000,30000,50000,100000", metavar="N,...",
        help="blocks of 512 tokens",
    )  # fmt: skip
    cache.add_argument("--json", metavar="OUT", help="write the list here")


def _add_trace(words: Words, *, required: bool) -> None:
    words.add("--trace", required=required, metavar="FILE", help=TRACE)
    words.add("--trace-format", choices=("mooncake",), default="mooncake")
    words.add("--model", default="llama3-70b", metavar="M", help=NAMES.format("models"))
    words.add("--hardware", default="a800x8", metavar="H", help=NAMES.format("hardware"))
    words.add("--slo-ttft-s", type=float, default=30.0, metavar="S", help="limit (default: 30)")
    words.add(
        "--slo-tbt-ms", type=float, default=100.0, metavar="MS",
        help="limit on the mean of the slowest tenth of gaps (default: 100)",
    )  # fmt: skip
    words.add("--speed", type=float, default=1.0, metavar="X", help="replay X times faster")
    words.add("--limit", type=int, metavar="N", help="only the first N requests")
    words.add("--seed", type=int, default=0, metavar="N")
    words.add("--json", metavar="OUT", help="write all figures here")
