"""The simulator in a terminal: a run with a progress bar, tables of results, pages of faults."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from rich.console import Console

from mooncake.sim.faults.random_faults import TrialReport
from mooncake.sim.planning import WANTED_RATIO, Tried
from mooncake.sim.results.plots import Line, lines_plot
from mooncake.sim.results.report import rows_of
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import Workload
from mooncake.telemetry.terminal import progress, show_rows

GC_EVERY = 200_000
"""How many objects may be made between two garbage collections: a simulation makes few cycles and
very many values.
"""


def run(config: SimulationConfig, workload: Workload, console: Console) -> SimulationResult:
    """Run one simulation with a progress bar, and return its result."""
    gc.set_threshold(GC_EVERY)
    simulation = Simulation(config, workload)
    what = f"{config.engine} {config.num_prefill}P{config.num_decode}D {config.scheduler.policy}"
    with progress(what, len(workload.arrivals), console) as move:
        simulation.run(move)
    return result_of(simulation)


def show(result: SimulationResult, console: Console) -> None:
    """Print the table of a run."""
    title = (
        f"{result.model} on {result.num_nodes} x {result.hardware}, {result.engine}, "
        f"{result.num_prefill}P{result.num_decode}D, {result.policy}"
    )
    show_rows(title, [["", ""], *(list(row) for row in rows_of(result))], console)


def tried_rows(tried: Sequence[Tried]) -> list[list[str]]:
    """Return the table of all clusters that a plan tried, the header first."""
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


def plan_plot(tried: Sequence[Tried]) -> str:
    """Return the SVG of the best share inside both limits for each number of nodes."""
    best: dict[int, float] = {}
    for one in tried:
        best[one.num_nodes] = max(best.get(one.num_nodes, 0.0), one.effective_ratio)
    nodes = sorted(best)
    lines = [
        Line(name="inside both limits", values=[best[number] for number in nodes]),
        Line(name="wanted", values=[WANTED_RATIO] * len(nodes)),
    ]
    return lines_plot([float(number) for number in nodes], lines, "nodes", "share of requests")


def fault_title(report: TrialReport) -> str:
    """Return the title of a run under faults."""
    return f"{sum(report.faults.values())} faults, seed {report.seed}"


def fault_tables(report: TrialReport) -> list[tuple[str, Sequence[Sequence[str]], str]]:
    """Return the tables of a run under faults: (title, rows with the header first, remark)."""
    rows = [["after the first request, s", "what"]]
    for line in report.injected:
        at_s, _, what = line.strip().partition("  FAULT ")
        rows.append([at_s, what])
    remark = "Every machine was checked after each of its events, and all of them at the end."
    return [("Outcome", report.rows, remark), ("Faults, as they happened", rows, "")]
