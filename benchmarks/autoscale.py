"""Node-hours against goodput while the load changes: `python -m benchmarks autoscale`.

The simulator plays one trace on the same hardware with fixed sizes, with the scaling policy of
which gateways make `mooncake:desired_replicas`, and with a plain rule: as a
HorizontalPodAutoscaler with a target of 70 % utilisation of each role. A request is good when its
first token and the mean of its slowest tenth of gaps are inside the limits; one that is refused is
not. All runs refuse what would miss the limits. The same command prints the same figures.

`--swing D` makes the load of a recorded trace rise and fall as between night and day, `--days`
times: its rate is 1 - D at night and 1 + D by day, as much in all. Without `--trace` the requests
are made up (`--requests`).
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console

from mooncake.base import Role
from mooncake.cli.results import as_json, check_writable, write
from mooncake.launch.config.shipped import figures
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.scaling.config import ROLES, ScalingConfig
from mooncake.sim import console as terminal
from mooncake.sim.files import read_trace
from mooncake.sim.results.plots import Line, lines_plot, picture, points_plot
from mooncake.sim.results.report import comparison_page
from mooncake.sim.results.result import result_of
from mooncake.sim.scaling import BUSY, FIXED, POLICY
from mooncake.sim.simulation import START_S, Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine, Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures
from mooncake.telemetry.terminal import show_rows

SIZES = ((2, 1), (3, 2), (4, 2), (6, 3), (8, 4))
NUM_SAMPLES = 240
KINDS = {FIXED: "fixed sizes", BUSY: "plain HPA", POLICY: "policy"}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster and what it did."""

    name: str
    scaling: str
    num_prefill: int
    num_decode: int
    node_hours: float
    good: int
    total: int
    refused: int
    ttft_p99_s: float
    tbt_p99_ms: float
    most: tuple[int, int] = (0, 0)
    """The largest number of prefill and decode replicas."""
    timeline: list[tuple[float, int, int]] = []

    @property
    def share(self) -> float:
        """The share of requests that kept their limits."""
        return self.good / self.total


def swung(lines: Sequence[TraceLine], depth: float, days: float) -> list[TraceLine]:
    """Return the requests of a trace at times at which their rate rises and falls `days` times,
    beginning at night; the whole takes as long.
    """
    if not depth or len(lines) < 2:
        return list(lines)
    first, last = lines[0].timestamp, lines[-1].timestamp
    turns = 2 * math.pi * days

    def asked_by(at: float) -> float:
        """Return the share of all requests that have come by the share `at` of the time."""
        whole = 1 - depth * math.sin(turns) / turns
        return (at - depth * math.sin(turns * at) / turns) / whole

    def moved(share: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if asked_by(middle) < share else (low, middle)
        return low

    span = last - first
    return [
        msgspec.structs.replace(
            line, timestamp=first + span * moved((line.timestamp - first) / span)
        )
        for line in lines
    ]


def made_up(number: int, rate: float, seed: int) -> list[TraceLine]:
    """Return requests at random times, whose prompts share a system prompt and differ otherwise."""
    random, at_s, lines = Random(seed), 0.0, []
    for index in range(number):
        at_s += random.expovariate(rate)
        tokens = min(32_768, max(512, round(random.lognormvariate(8.6, 0.8))))
        blocks = -(-tokens // TRACE_BLOCK_TOKENS)
        lines.append(
            TraceLine(
                timestamp=1e3 * at_s,
                input_length=tokens,
                output_length=min(1024, max(8, round(random.lognormvariate(5.2, 0.6)))),
                hash_ids=[0, *range(1 + 64 * index, blocks + 64 * index)],
            )
        )
    return lines


def played(config: SimulationConfig, workload: Workload, name: str) -> Run:
    """Simulate one cluster."""
    gc.set_threshold(terminal.GC_EVERY)
    simulation = Simulation(config, workload)
    simulation.run()
    result = result_of(simulation)
    changes = simulation.scaler.timeline
    return Run(
        name=name,
        scaling=config.scaling,
        num_prefill=config.num_prefill,
        num_decode=config.num_decode,
        node_hours=result.node_hours,
        good=result.effective_requests,
        total=result.requests.total,
        refused=result.requests.rejected,
        ttft_p99_s=result.ttft_s.p99,
        tbt_p99_ms=result.tbt_slow10_ms.p99,
        most=(max(each[1] for each in changes), max(each[2] for each in changes)),
        timeline=[(round(each[0] - START_S, 1), each[1], each[2]) for each in changes],
    )


def configs(args: argparse.Namespace) -> list[tuple[str, SimulationConfig]]:
    """Return the clusters that are compared."""
    bounds = ScalingConfig.parse(args.autoscale)
    base = SimulationConfig(
        model=figures(args.model, ModelFigures),
        hardware=figures(args.hardware, HardwareFigures),
        num_prefill=1,
        num_decode=1,
        ttft_slo_s=args.slo_ttft_s,
        tbt_slo_s=args.slo_tbt_ms / 1e3,
        scheduler=SchedulerConfig(
            ttft_slo_s=args.slo_ttft_s,
            tbt_slo_s=args.slo_tbt_ms / 1e3,
            autoscale=args.autoscale,
        ),
    )
    found = [
        (
            f"fixed {prefill}P {decode}D",
            msgspec.structs.replace(base, num_prefill=prefill, num_decode=decode),
        )
        for prefill, decode in args.sizes
    ]
    first = {role: bounds.bounds(role).clamp(2) for role in ROLES}
    for rule, name in ((BUSY, "plain HPA, 70 % busy"), (POLICY, "policy")):
        scaled = msgspec.structs.replace(
            base,
            num_prefill=first[Role.PREFILL],
            num_decode=first[Role.DECODE],
            scaling=rule,
        )
        found.append((name, scaled))
    return found


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table, the header first."""
    head = ["cluster", "node-hours", "kept both limits", "refused", "TTFT p99", "TBT p99", "most"]
    return [
        head,
        *(
            [
                run.name, f"{run.node_hours:.1f}", f"{run.share:.2%}", str(run.refused),
                f"{run.ttft_p99_s:.1f} s", f"{run.tbt_p99_ms:.0f} ms",
                f"{run.most[0]}P {run.most[1]}D",
            ]
            for run in runs
        ),
    ]  # fmt: skip


def cost_plot(runs: Sequence[Run]) -> str:
    """Return the plot of cost against goodput."""
    points = {
        name: [(run.node_hours, 100 * run.share) for run in runs if run.scaling == kind]
        for kind, name in KINDS.items()
    }
    return points_plot(points, "node-hours", "% inside both limits")


def plots_of(runs: Sequence[Run], workload: Workload) -> list[tuple[str, str]]:
    """Return the plots: cost against goodput, and replicas over time."""
    end_s = workload.duration_s
    times = [end_s * number / NUM_SAMPLES for number in range(NUM_SAMPLES + 1)]
    lines = [
        Line(name=f"{run.name}: {role.value}", values=[_held(run, at, index) for at in times])
        for run in runs
        if run.scaling != FIXED
        for index, role in enumerate(ROLES, 1)
    ]
    return [
        ("Node-hours against goodput", cost_plot(runs)),
        ("Replicas", lines_plot(times, lines, "seconds", "replicas")),
    ]


def _held(run: Run, at_s: float, index: int) -> float:
    """Return the replicas of a role that were paid for at a time."""
    return float(next(each[index] for each in reversed(run.timeline) if each[0] <= at_s))


def _play(task: tuple[str, SimulationConfig, Workload]) -> Run:
    name, config, workload = task
    return played(config, workload, name)


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (each.split(":") for each in text.split(","))
    return tuple((int(prefill), int(decode)) for prefill, decode in pairs)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks autoscale", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="JSONL, as of `mooncake simulate`")
    parser.add_argument("--limit", type=int, help="use only the first N requests")
    parser.add_argument("--speed", type=float, default=1.0, help="replay so many times faster")
    parser.add_argument("--requests", type=int, default=3000, help="made up, without --trace")
    parser.add_argument("--rate", type=float, default=1.0, help="of these, requests a second")
    parser.add_argument("--swing", type=float, default=0.7, help="0: the load as recorded")
    parser.add_argument("--days", type=float, default=2.0, help="how often it rises and falls")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--hardware", default="a800x8")
    parser.add_argument("--slo-ttft-s", type=float, default=30.0)
    parser.add_argument("--slo-tbt-ms", type=float, default=100.0)
    parser.add_argument("--autoscale", default="prefill=1..12,decode=1..6,start=120,quiet=300")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="fixed ones: P:D,P:D,...")
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--report", help="write a page with the plots here")
    parser.add_argument("--svg", help="draw node-hours against goodput there")
    args = parser.parse_args(argv)
    check_writable(args.json, args.report, args.svg)
    if args.trace is None:
        lines = made_up(args.requests, args.rate, seed=1)
    else:
        lines = read_trace(str(args.trace))
    workload = Workload.replay(swung(lines[: args.limit], args.swing, args.days), speed=args.speed)
    tasks = [(name, config, workload) for name, config in configs(args)]
    if args.processes > 1:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            runs = pool.map(_play, tasks, chunksize=1)
    else:
        runs = [_play(task) for task in tasks]
    rows = rows_of(runs)
    title = f"{len(workload.arrivals)} requests in {workload.duration_s:,.0f} s"
    show_rows(title, rows, Console())
    write(args.json, as_json(runs))
    write(args.svg, picture(cost_plot(runs), list(KINDS.values()), x=460, y=150))
    remark = f"{args.model} on {args.hardware}; a request is good inside {args.slo_ttft_s:g} s and "
    remark += f"{args.slo_tbt_ms:g} ms. Bounds: {args.autoscale}."
    write(
        args.report, comparison_page(title, [("Clusters", rows, remark)], plots_of(runs, workload))
    )
    return 0
