"""What `mooncake simulate`, `mooncake plan` and `mooncake trace` do: files to `sim`, results to
files and tables.

Reads files here, so that the simulator need not; decides nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake.base import ConfigError
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.cost_model import HardwareFigures, ModelFigures
from mooncake.sim.planning import WANTED_RATIO, Tried, plan_cluster
from mooncake.sim.plots import Line, lines_plot
from mooncake.sim.report import comparison_page, page, rows_of
from mooncake.sim.result import SimulationResult, result_of
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.trace_cache import hit_rate
from mooncake.sim.workload import (
    TRACE_BLOCK_TOKENS,
    TraceLine,
    Workload,
    describe,
    parse_trace,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Figures of models and of hardware; part of the package."""
GC_EVERY = 200_000
"""Objects between two collections: a simulation makes few cycles and very many values."""


Figures = TypeVar("Figures", ModelFigures, HardwareFigures)


# ---------------------------------------------------------------- commands


def simulate(arguments: argparse.Namespace) -> int:
    """Run `mooncake simulate`."""
    check_writable(arguments.json, arguments.report)
    config = simulation_config(arguments)
    console, begun_s = Console(stderr=True), time.process_time()
    result = run(config, workload_of(arguments), console)
    took_s = time.process_time() - begun_s
    console.print(
        f"{result.duration_s:,.0f} s of {result.num_nodes} nodes, {result.num_events:,} events, "
        f"simulated in {took_s:,.0f} s of one core: {result.duration_s / max(took_s, 1e-3):,.1f} "
        "times as fast as life"
    )
    write(arguments.json, as_json(result))
    write(arguments.report, page(result))
    show(result, Console())
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Run `mooncake plan`."""
    check_writable(arguments.json, arguments.report)
    console = Console(stderr=True)
    base = SimulationConfig(
        model=figures("models", arguments.model, ModelFigures),
        hardware=figures("hardware", arguments.hardware, HardwareFigures),
        num_prefill=1,
        num_decode=1,
        ttft_slo_s=_positive(arguments.slo_ttft_s, "--slo-ttft-s"),
        tbt_slo_s=_positive(arguments.slo_tbt_ms, "--slo-tbt-ms") / 1e3,
        seed=arguments.seed,
    )
    workload = Workload.replay(
        read_trace(arguments.trace), speed=arguments.speed, limit=arguments.limit
    )

    def attempt(config: SimulationConfig) -> SimulationResult:
        return run(config, workload, console)

    tried = plan_cluster(base, attempt, arguments.max_nodes)
    write(arguments.json, as_json(tried))
    rows = _tried_rows(tried)
    title = f"{base.model.name} on {base.hardware.name}: what was tried"
    remark = "Chosen: the fewest instances with 99 % of requests inside both limits."
    plots = [("Requests inside both limits, best split tried", _plan_plot(tried))]
    write(arguments.report, comparison_page(title, [("Clusters", rows, remark)], plots))
    show_rows(title, rows, Console())
    best = next((one for one in tried if one.chosen), None)
    if best is None:
        raise ConfigError(f"no cluster of up to {arguments.max_nodes} nodes keeps 99 % inside")
    Console().print(
        f"{best.num_nodes} nodes: {best.num_prefill} prefill and {best.num_decode} decode instances"
    )
    return 0


def trace_describe(arguments: argparse.Namespace) -> int:
    """Run `mooncake trace describe`."""
    facts = describe(read_trace(arguments.file))
    write(arguments.json, as_json(facts))
    rows = [
        ["", ""],
        ["requests", f"{facts.num_requests:,}"],
        ["from first to last", f"{facts.duration_s:,.0f} s ({facts.requests_per_s:.2f} a second)"],
        *([f"{what} tokens", _spread(spread)] for what, spread in (
            ("prompt", facts.input_tokens), ("output", facts.output_tokens))),
        [f"blocks of {TRACE_BLOCK_TOKENS} tokens", f"{facts.num_block_refs:,}"],
        ["different ones", f"{facts.num_unique_blocks:,}, {facts.used_once_ratio:.1%} used once"],
        ["hit rate of a cache without bound", f"{facts.max_hit_rate:.1%}"],
    ]  # fmt: skip
    show_rows(arguments.file, rows, Console())
    return 0


def _spread(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in spread.items())


def trace_cache(arguments: argparse.Namespace) -> int:
    """Run `mooncake trace cache`."""
    trace = read_trace(arguments.file)
    try:
        capacities = [int(part) for part in arguments.capacity.split(",")]
    except ValueError:
        raise ConfigError(f"--capacity: {arguments.capacity!r} is no list of numbers") from None
    rates = [hit_rate(trace, arguments.policy, capacity) for capacity in capacities]
    write(arguments.json, as_json(rates))
    rows = [["blocks", "hit rate"], *([f"{r.capacity:,}", f"{r.hit_rate:.1%}"] for r in rates)]
    show_rows(f"{arguments.policy}, one pool", rows, Console())
    return 0


# ---------------------------------------------------------------- parts


def run(config: SimulationConfig, workload: Workload, console: Console) -> SimulationResult:
    """Run one simulation with a bar, and return what came out."""
    gc.set_threshold(GC_EVERY)
    simulation = Simulation(config, workload)
    what = f"{config.engine} {config.num_prefill}P{config.num_decode}D {config.scheduler.policy}"
    with progress_of(what, len(workload.arrivals), console) as progress:
        simulation.run(progress)
    return result_of(simulation)


@contextmanager
def progress_of(what: str, total: int, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; yields what moves it: (requests that have ended, all of them)."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=total)
        yield lambda done, _: bar.update(task, completed=done)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the trace as it is to be replayed."""
    if arguments.trace is None:
        raise ConfigError("--trace is missing")
    return Workload.replay(
        read_trace(arguments.trace),
        speed=_positive(arguments.speed, "--speed"),
        limit=arguments.limit,
        max_output_tokens=arguments.max_output,
    )


def simulation_config(arguments: argparse.Namespace) -> SimulationConfig:
    """Return the cluster that the words describe."""
    ttft_s = _positive(arguments.slo_ttft_s, "--slo-ttft-s")
    tbt_s = _positive(arguments.slo_tbt_ms, "--slo-tbt-ms") / 1e3
    coupled = arguments.engine != "mooncake"
    prefill = arguments.prefill if arguments.prefill is not None else 0 if coupled else 8
    decode = arguments.decode if arguments.decode is not None else 16 if coupled else 8
    return SimulationConfig(
        model=figures("models", arguments.model, ModelFigures),
        hardware=figures("hardware", arguments.hardware, HardwareFigures),
        num_prefill=prefill,
        num_decode=decode,
        engine=arguments.engine,
        scheduler=SchedulerConfig(
            policy=arguments.policy,
            fetch_remote=not arguments.local_caches,
            ttft_slo_s=ttft_s if arguments.reject else None,
            tbt_slo_s=tbt_s if arguments.reject else None,
            role_switching=arguments.role_switching,
        ),
        ttft_slo_s=ttft_s,
        tbt_slo_s=tbt_s,
        pool_tokens=arguments.pool_tokens,
        link_bytes_per_s=arguments.link_gbps * 1e9 / 8 if arguments.link_gbps else None,
        seed=arguments.seed,
    )


def figures(folder: str, name: str, kind: type[Figures]) -> Figures:
    """Return the figures of a model or of hardware, by name or as a JSON file.

    Raises:
        ConfigError: there are none of that name, or the file is malformed.
    """
    path = Path(name) if name.endswith(".json") else CONFIGS / folder / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"no figures of {name!r}; known: {_names(folder)}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None


def read_trace(name: str) -> list[TraceLine]:
    """Return the requests of a trace file."""
    try:
        with open(name, "rb") as file:
            return parse_trace(file, name)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def _names(folder: str) -> str:
    return ", ".join(sorted(path.stem for path in (CONFIGS / folder).glob("*.json")))


def _positive(value: float, flag: str) -> float:
    if not value > 0:
        raise ConfigError(f"{flag}: must be above 0, not {value:g}")
    return value


def as_json(value: object) -> str:
    """Return JSON that is the same for the same value."""
    return json.dumps(msgspec.to_builtins(value), indent=1, sort_keys=True) + "\n"


def check_writable(*names: str | None) -> None:
    """Raise ConfigError where a file could not be written: before the work, not after it."""
    for name in names:
        if name is None:
            continue
        path = Path(name).absolute()
        if not path.parent.is_dir():
            raise ConfigError(f"{name}: its directory is not there")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{name}: cannot be written")


def write(name: str | None, text: str) -> None:
    """Write a file if one is asked for."""
    if name is None:
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def show(result: SimulationResult, console: Console) -> None:
    """Print the table of a run."""
    title = (
        f"{result.model} on {result.num_nodes} x {result.hardware}, {result.engine}, "
        f"{result.num_prefill}P{result.num_decode}D, {result.policy}"
    )
    show_rows(title, [["", ""], *(list(row) for row in rows_of(result))], console)


def show_rows(title: str, rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print rows, the header first."""
    head, *rest = rows
    table = Table(title=title, show_header=any(head))
    for number, cell in enumerate(head):
        table.add_column(cell, justify="right" if number else "left")
    for row in rest:
        table.add_row(*row)
    console.print(table)


def _plan_plot(tried: Sequence[Tried]) -> str:
    best: dict[int, float] = {}
    for one in tried:
        best[one.num_nodes] = max(best.get(one.num_nodes, 0.0), one.effective_ratio)
    nodes = sorted(best)
    lines = [
        Line(name="inside both limits", values=[best[number] for number in nodes]),
        Line(name="wanted", values=[WANTED_RATIO] * len(nodes)),
    ]
    return lines_plot([float(number) for number in nodes], lines, "nodes", "share of requests")


def _tried_rows(tried: Sequence[Tried]) -> list[list[str]]:
    head = [
        "nodes",
        "prefill",
        "decode",
        "inside both limits",
        "TTFT p99",
        "TBT p99",
        "busy P / D",
        "",
    ]
    return [
        head,
        *(
            [
                str(one.num_nodes), str(one.num_prefill), str(one.num_decode),
                f"{one.effective_ratio:.2%}", f"{one.ttft_p99_s:.2f} s", f"{one.tbt_p99_ms:.0f} ms",
                f"{one.prefill_utilisation:.0%} / {one.decode_utilisation:.0%}",
                "chosen" if one.chosen else "",
            ]
            for one in tried
        ),
    ]  # fmt: skip
