"""Kimi-K2 on sixteen nodes, simulated: `python -m benchmarks scale --trace FILE`.

The highest rate at which 90 % of a published trace's requests keep their limits: of engines that
compute prompts beside decode (`coupled-chunked-prefix`: chunks, a prefix cache in each engine), of
prefill and decode apart, and of both with the pool. Each system is played with several settings
(tokens of a step, or how many engines prefill), slower and faster, until limits are kept and
missed, and the best one counts. Nothing is refused. `--every 4` plays one conversation in four of
the whole trace. `--out` keeps runs, and a later call goes on behind them; `--only` plays a part.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.support.goodput_figures import Highest, Limits, Outcome, Trial, highest_rate
from benchmarks.support.kept_runs import KeptRuns
from mooncake.base import Shape
from mooncake.launch.config.shipped import figures
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.console import GC_EVERY
from mooncake.sim.files import read_trace
from mooncake.sim.results.plots import picture, points_plot
from mooncake.sim.results.report import comparison_page
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import TraceLine, Workload, describe
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

MODEL = "kimi-k2-thinking"
NUM_NODES = 16
WANTED = 0.9
FASTER = 1.5
"""The factor from one rate to the next."""
ALIKE = 0.02
"""Settings whose shares of good requests differ by less all go on to the next rate."""
MOST_STEPS = 6
"""So many rates above and below the first are played at most."""
POOL_TOKENS = 12_000_000
"""Tokens in the pool of a node: 0.84 TB of DRAM (Mooncake, FAST'25: about 1 TB)."""
SHAPES = {"h200x8": Shape(tp=8, dcp=8), "h800x8": Shape(tp=8, pp=2, dcp=8)}
"""Hardware -> the shape of an engine. Eight H800 have no room for the model."""
SPLITS = {16: (8, 10, 12), 8: (4, 5, 6)}
"""Engines in all -> how many of them prefill."""
CHUNKS = (512, 1024, 2048)
"""Tokens of a step of engines that do both."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run sixteen nodes."""

    system: str
    name: str
    num_prefill: int = 0
    more: tuple[tuple[str, Any], ...] = ()
    """Further fields of `SimulationConfig`."""


class Run(Trial, frozen=True, kw_only=True):
    """One simulation; `load` names the hardware, `server` the setting."""

    system: str
    hit_rate: float
    """The share of prompt tokens that were found in a cache."""


def settings(num_engines: int) -> list[Setting]:
    """Return all settings that are tried with so many engines."""
    own = SchedulerConfig(policy="local-cache-aware", fetch_remote=False)
    found = []
    for system, scheduler, pool in (
        ("both in one engine", own, False),
        ("both in one engine, with the pool", SchedulerConfig(), True),
    ):
        for chunk in CHUNKS:
            fields = {
                "engine": "coupled-chunked-prefix", "coupled_chunk_tokens": chunk,
                "scheduler": scheduler, "decode_pools": pool,
            }  # fmt: skip
            name = f"steps of {chunk:,}"
            found.append(Setting(system=system, name=name, more=tuple(fields.items())))
    for system, scheduler, pool in (
        ("apart", own, False),
        ("apart, with the pool", SchedulerConfig(), True),
    ):
        for split in SPLITS[num_engines]:
            fields = {"scheduler": scheduler} | ({} if pool else {"pool_tokens": 0})
            name = f"{split}P{num_engines - split}D"
            found.append(
                Setting(system=system, name=name, num_prefill=split, more=tuple(fields.items()))
            )
    return found


def some_of(lines: Sequence[TraceLine], every: int) -> list[TraceLine]:
    """Return one conversation in `every`, drawn from all of a trace: prefixes are shared as in the
    whole. The requests of a conversation have their second block in common: the first is the
    system prompt of all.
    """
    random = Random(0)
    drawn: dict[int, bool] = {}
    for line in lines:
        first = line.hash_ids[:2][-1]
        if first not in drawn:
            drawn[first] = random.randrange(every) == 0
    return [line for line in lines if drawn[line.hash_ids[:2][-1]]]


def engines_on(hardware: str) -> int:
    """Return how many engines sixteen nodes are."""
    shape = SHAPES[hardware]
    return NUM_NODES * figures(hardware, HardwareFigures).num_gpus // (shape.tp * shape.pp)


def play(hardware: str, setting: Setting, lines: Sequence[TraceLine], rate: float) -> Run:
    """Simulate one setting under the trace, so fast that `rate` requests come a second."""
    gc.set_threshold(GC_EVERY)
    shape, num_engines = SHAPES[hardware], engines_on(hardware)
    fields = {"pool_tokens": POOL_TOKENS * NUM_NODES // num_engines} | dict(setting.more)
    workload = Workload.replay(lines)
    workload = Workload.replay(lines, speed=rate * workload.duration_s / len(lines))
    config = SimulationConfig(
        model=figures(MODEL, ModelFigures),
        hardware=figures(hardware, HardwareFigures),
        shape=shape,
        num_prefill=setting.num_prefill,
        num_decode=num_engines - setting.num_prefill,
        **fields,
    )
    simulation = Simulation(config, workload)
    simulation.run()
    measures = simulation.measures
    return Run(
        load=hardware,
        server=setting.name,
        system=setting.system,
        rate=rate,
        seed=config.seed,
        outcomes=[
            Outcome(
                end="whole" if one.completed else "failed",
                ttft_s=one.ttft_s or 0.0,
                tbt_s=one.slow_gap_s,
            )
            for one in measures.requests
        ],
        idle_ttft_s=0.0,
        idle_tbt_s=0.0,
        load_average=0.0,
        hit_rate=measures.hit_tokens / max(1, measures.prompt_tokens),
    )


def search(
    args: argparse.Namespace, hardware: str, lines: Sequence[TraceLine], limits: Sequence[Limits]
) -> Iterator[Run]:
    """Yield the runs of each system: from the rate on at which all its settings are played, slower
    until the strictest limits, the first ones, are kept, and faster until the loosest are missed.
    Slower all settings go on, since short steps are good where there is time for all prompts;
    faster those that are among the best by any limits.
    """
    kept = KeptRuns(args.out, Run)
    known = {(run.load, run.system, run.server, round(run.rate, 6)): run for run in kept.read()}
    systems: dict[str, list[Setting]] = {}
    for setting in settings(engines_on(hardware)):
        name = f"{setting.system}, {setting.name}"
        if not args.only or any(part in name for part in args.only):
            systems.setdefault(setting.system, []).append(setting)

    def played(setting: Setting, rate: float) -> Run:
        run = known.get((hardware, setting.system, setting.name, round(rate, 6)))
        if run is None or len(run.outcomes) != len(lines):
            run = play(hardware, setting, lines, rate)
            kept.add(run)
        return run

    for tried in systems.values():
        first = [played(setting, args.rate) for setting in tried]
        yield from first
        for factor, wanted in ((1 / FASTER, limits[:1]), (FASTER, limits[-1:])):
            left, runs, rate = tried, first, args.rate
            for _ in range(MOST_STEPS):
                if factor > 1:
                    left = _going_on(left, runs, limits)
                keeps = any(run.share(each) >= WANTED for run in runs for each in wanted)
                if keeps is (factor < 1):
                    break
                rate *= factor
                runs = [played(setting, rate) for setting in left]
                yield from runs


def _going_on(
    left: Sequence[Setting], runs: Sequence[Run], limits: Sequence[Limits]
) -> list[Setting]:
    """Return the settings that are among the best by any limits."""
    least = [max(run.share(each) for run in runs) - ALIKE for each in limits]
    return [
        setting
        for setting, run in zip(left, runs, strict=True)
        if any(run.share(each) >= some for each, some in zip(limits, least, strict=True))
    ]


# ---------------------------------------------------------------- what comes of it


@dataclass(frozen=True, kw_only=True)
class Best:
    """The setting of a system that keeps limits at the highest rate."""

    system: str
    setting: str
    highest: Highest
    runs: Sequence[Run]
    """The runs of that setting, by rate."""

    @property
    def near(self) -> Run:
        """Return the run of the highest rate that kept the limits, or else of the lowest."""
        return max((run for run in self.runs if run.rate <= self.highest.rate),
                   key=lambda run: run.rate, default=self.runs[0])  # fmt: skip


def best_of(runs: Sequence[Run], limits: Limits) -> list[Best]:
    """Return the best setting of each system, in the order in which systems were played."""
    found: dict[str, Best] = {}
    for system, name in dict.fromkeys((run.system, run.server) for run in runs):
        own = sorted(
            (run for run in runs if (run.system, run.server) == (system, name)),
            key=lambda run: run.rate,
        )
        highest = highest_rate([(run.rate, run.share(limits)) for run in own], WANTED)
        one = Best(system=system, setting=name, highest=highest, runs=own)
        if system not in found or _order(one, limits) > _order(found[system], limits):
            found[system] = one
    return list(found.values())


def _order(one: Best, limits: Limits) -> tuple[bool, float, float]:
    """Return what a better setting has more of. Of those that keep the limits at no rate, the best
    ones were played slowest.
    """
    kept = one.highest.bound != "<"
    return kept, one.highest.rate if kept else 0.0, one.runs[0].share(limits)


def rows_of(runs: Sequence[Run], hardware: str, limits: Limits) -> list[list[str]]:
    """Return the table of one kind of hardware and limits, the header first."""
    known = figures(hardware, HardwareFigures)
    gpus = NUM_NODES * known.num_gpus
    rows = [
        [
            "system", "best setting", "requests/s at 90 % good", "per GPU", "per dollar",
            "prompt tokens cached", "median TTFT", "median TBT",
        ]
    ]  # fmt: skip
    for best in best_of(runs, limits):
        rate, near, dollars = best.highest.rate, best.near, known.gpu_hour_dollars
        kept = best.highest.bound != "<"
        per_dollar = f"{3600 * rate / gpus / dollars:,.0f}" if dollars and kept else ""
        rows.append(
            [
                best.system, best.setting, str(best.highest),
                f"{rate / gpus:.3f}" if kept else "", per_dollar, f"{near.hit_rate:.0%}",
                f"{near.median('ttft_s') or 0.0:.2f} s",
                f"{1e3 * (near.median('tbt_s') or 0.0):.0f} ms",
            ]
        )  # fmt: skip
    return rows


def figure_of(runs: Sequence[Run], limits: Limits) -> tuple[str, list[str]]:
    """Return the plot of the share of good requests by rate, of the best setting of each system,
    and the names of its lines.
    """
    lines = {
        f"{best.system}, {best.setting}": [(run.rate, 100 * run.share(limits)) for run in best.runs]
        for best in best_of(runs, limits)
    }
    return points_plot(lines, "requests a second", "% of requests that are good"), list(lines)


def constants(hardware: str) -> list[str]:
    """Return each figure of a kind of hardware, and of the model, with where it comes from."""
    known, model = figures(hardware, HardwareFigures), figures(MODEL, ModelFigures)
    lines = [f"{each.name}, {what}: {source}" for each in (known, model)
             for what, source in each.sources.items()]  # fmt: skip
    return [*lines, known.remark]


def main(argv: Sequence[str]) -> int:
    """Run what is missing and print every table; returns the exit code."""
    args = _arguments(argv)
    lines = some_of(read_trace(args.trace), args.every)
    facts = describe(lines)
    print(
        f"{facts.num_requests:,} requests, {facts.input_tokens['mean']:,.0f} tokens in and "
        f"{facts.output_tokens['mean']:,.0f} out in the mean; a cache without bounds has "
        f"{facts.max_hit_rate:.0%} of their blocks"
    )
    limits = [Limits(ttft_s=args.ttft_s, tbt_s=tbt_ms / 1e3) for tbt_ms in sorted(args.tbt_ms)]
    tables, plots = [], []
    for hardware in args.hardware:
        runs = []
        for run in search(args, hardware, lines, limits):
            runs.append(run)
            shares = ", ".join(f"{run.share(each):.0%}" for each in limits)
            print(f"{hardware} {run.system}, {run.server}: {run.rate:.1f}/s {shares}", flush=True)
        for each in limits:
            head = (
                f"{MODEL} on {NUM_NODES} x {hardware}, engines of {SHAPES[hardware]}, TTFT <= "
                f"{each.ttft_s:g} s, TBT <= {1e3 * each.tbt_s:g} ms"
            )
            rows = rows_of(runs, hardware, each)
            tables.append((head, rows, figures(hardware, HardwareFigures).remark))
            plot, names = figure_of(runs, each)
            plots.append((head, plot))
            if args.svg and each is limits[0]:
                file = args.svg / f"scale-{hardware}.svg"
                file.write_text(picture(plot, names, x=70, y=140))
            print(f"\n{head}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
            print("\n".join(f"| {' | '.join(row)} |" for row in rows[1:]))
        print("\n" + "\n".join(f"- {line}" for line in constants(hardware)))
    if args.report:
        args.report.write_text(comparison_page("Kimi-K2 on sixteen nodes", tables, plots))
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scale", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trace", required=True)
    parser.add_argument(
        "--every", type=int, default=1, help="play one conversation in so many of the trace (1)"
    )
    parser.add_argument("--hardware", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", nargs="+", metavar="PART", help="of 'system, setting'")
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second at first (24)")
    parser.add_argument("--ttft-s", type=float, default=5.0, help="limit of the first token (5)")
    parser.add_argument("--tbt-ms", type=float, nargs="+", default=[50.0, 100.0])
    parser.add_argument("--out", type=Path, help="file of runs, to which missing ones are added")
    parser.add_argument("--report", type=Path, help="page of tables and plots")
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help="write the strictest limits' plots there"
    )
    return parser.parse_args(argv)
