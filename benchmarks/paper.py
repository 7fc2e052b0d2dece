"""The paper's tables, side by side: `python -m benchmarks paper --trace conversation_trace.jsonl`.

Every run is one simulation (`mooncake.sim`) of those in `paper_tables`; results are kept under
`--out` and not run twice, so a long list may be stopped and taken up again. `--only fig5,er` runs a
part, `--jobs` several at once. `--model kimi-k2-thinking --hardware h200x8 --speed 4` plays all of
it on another model and hardware, the trace four times as fast, as those nodes do that much more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.support.paper_tables import EXPERIMENTS, MODEL, Experiment, Play
from mooncake.launch.config.shipped import figures
from mooncake.sim.files import read_trace
from mooncake.sim.results.report import comparison_page
from mooncake.sim.results.result import SimulationResult
from mooncake.sim.workload import TraceLine
from mooncake.sim.world.cost_model import HardwareFigures


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and print every table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    parser.add_argument("--out", default="build/paper", help="folder of results and report.html")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--hardware", default="a800x8")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace, in every run")
    parser.add_argument("--er-tbt-ms", type=float, help="limit of the early-rejection runs")
    parser.add_argument("--pool-tokens", type=int, help="of each prefill instance, in every run")
    arguments = parser.parse_args(argv)
    trace, out = read_trace(arguments.trace), Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    console, tables = Console(), []
    fitted = figures(arguments.hardware, HardwareFigures).remark
    names = arguments.only.split(",")
    experiments = {name: _on(arguments, EXPERIMENTS[name]) for name in names}
    _run_missing(experiments, trace, arguments.trace, out, arguments.jobs)
    for experiment in experiments.values():
        results = {label: _read(out, label, play) for label, play in experiment.plays.items()}
        rows = experiment.table({k: v for k, v in results.items() if v is not None}, trace)
        heading = f"{experiment.heading} ({arguments.model} on {arguments.hardware})"
        remark = " ".join(filter(None, (experiment.remark, fitted)))
        table = Table(title=heading, caption=remark)
        for cell in rows[0]:
            table.add_column(cell)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
        tables.append((heading, rows, remark))
    (out / "report.html").write_text(comparison_page("Mooncake, side by side", tables))
    return 0


def _on(arguments: argparse.Namespace, experiment: Experiment) -> Experiment:
    """Return an experiment with all its plays on the model and hardware that are asked for."""

    def other(play: Play) -> Play:
        more, scheduler = dict(play.more), dict(play.scheduler)
        if arguments.pool_tokens is not None and "pool_tokens" not in more:
            more["pool_tokens"] = arguments.pool_tokens
        if arguments.er_tbt_ms is not None and "tbt_slo_s" in scheduler:
            scheduler["tbt_slo_s"] = more["tbt_slo_s"] = arguments.er_tbt_ms / 1e3
        return dataclasses.replace(
            play, model=arguments.model, hardware=arguments.hardware,
            speed=play.speed * arguments.speed,
            more=tuple(more.items()), scheduler=tuple(scheduler.items()),
        )  # fmt: skip

    plays = {label: other(play) for label, play in experiment.plays.items()}
    return dataclasses.replace(experiment, plays=plays)


def _run_missing(
    experiments: Mapping[str, Experiment],
    trace: Sequence[TraceLine],
    trace_name: str,
    out: Path,
    jobs: int,
) -> None:
    missing = {
        _path(out, label, play): play
        for experiment in experiments.values()
        for label, play in experiment.plays.items()
        if not _path(out, label, play).exists()
    }
    if jobs == 1:
        for path, play in missing.items():
            _save(path, play.result(trace))
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(_one, play, trace_name): path for path, play in missing.items()}
        for future in as_completed(futures):
            _save(futures[future], future.result())


def _one(play: Play, trace_name: str) -> SimulationResult:
    return play.result(read_trace(trace_name))


def _path(out: Path, label: str, play: Play) -> Path:
    parts = [label, f"{play.num_prefill}P{play.num_decode}D", play.model, str(play.limit or "all")]
    if play.model != MODEL:
        parts += [play.hardware, f"x{play.speed:g}"]
    return out / ("_".join(parts).replace(" ", "-") + ".json")


def _save(path: Path, result: SimulationResult) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(result), indent=1, sort_keys=True) + "\n")


def _read(out: Path, label: str, play: Play) -> SimulationResult | None:
    path = _path(out, label, play)
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=SimulationResult)


if __name__ == "__main__":
    raise SystemExit(main())
