"""`mooncake simulate` plays a trace, faults or the choices of one call by the shipped code."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from rich.console import Console

from mooncake.base import ConfigError, Shape
from mooncake.cli.command import Command
from mooncake.cli.results import as_json, check_writable, write
from mooncake.launch.config.options import values_of
from mooncake.launch.config.shipped import figures
from mooncake.launch.config.sim_settings import SimulateSettings
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.choice_replay import BundledPlacement, replay
from mooncake.sim import console as terminal
from mooncake.sim.faults.plan import KINDS
from mooncake.sim.faults.random_faults import Trial, TrialReport, describe_failure
from mooncake.sim.faults.run import FaultyRun
from mooncake.sim.files import read_bundle, read_faults, read_trace
from mooncake.sim.results.report import comparison_page, page
from mooncake.sim.results.result import result_of
from mooncake.sim.scaling import FIXED
from mooncake.sim.simulation import SimulationConfig
from mooncake.sim.workload import Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures
from mooncake.telemetry.terminal import progress, show_rows

RANDOM = "random"
NOBODY = "nobody: no worker is large enough"
EXAMPLES = """\
mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 --prefill 8 --decode 8
mooncake simulate --trace trace.jsonl --model kimi-k2-thinking --hardware h200x8 \\
    --prefill 2 --decode 2 --speed 2 --slo-ttft-s 10 --slo-tbt-ms 50 --report run.html
mooncake simulate --trace trace.jsonl --model llama3-70b --hardware a800x8 \\
    --engine coupled-prefix --decode 16      engines that do everything, as a baseline
mooncake simulate --trace trace.jsonl --model kimi-k2-thinking --hardware h200x8 --shape tp8
mooncake simulate --config run.yaml --seed 2   keys are the flags' names; flags come first
mooncake simulate --faults random --seed 7     a small cluster under faults, checked
mooncake simulate --faults faults.yaml --trace trace.jsonl --limit 300 --prefill 2 --decode 2
mooncake simulate --replay bundle.json         who is chosen for a call, by the facts of then
"""
NOTES = """\
A file of faults is a YAML list or JSONL, each with at_s (seconds after the first request), kind and
what the kind needs; without --trace they happen to the small cluster of --seed:
  - {at_s: 10, kind: kill, target: prefill-0}
  - {at_s: 12, kind: cut, target: decode-node-0, other: prefill-node-1, seconds: 5}
  - {at_s: 20, kind: lose, amount: 0.1, seconds: 3}
Ranks have faults of their own where --shape names them, and in half of the clusters of a --seed.
kinds:
""" + "\n".join(f"  {kind:15} {effect}" for kind, effect in KINDS.items())


def run(wanted: SimulateSettings) -> int:
    """Play the trace, let faults happen, or replay a call. Return 1 if a check failed."""
    if wanted.replay is not None:
        return replay_bundle(wanted.replay, wanted.json)
    if wanted.faults is not None:
        with _no_logs():
            return _under_faults(wanted, wanted.faults)
    check_writable(wanted.json, wanted.report)
    config = simulation_config(wanted)
    console, begun_s = Console(stderr=True), time.process_time()
    result = terminal.run(config, _workload(wanted), console)
    took_s = time.process_time() - begun_s
    console.print(
        f"{result.duration_s:,.0f} s of {result.num_nodes} nodes, {result.num_events:,} events, "
        f"simulated in {took_s:,.0f} s of one core: {result.duration_s / max(took_s, 1e-3):,.1f} "
        "times as fast as life"
    )
    write(wanted.json, as_json(result))
    write(wanted.report, page(result))
    terminal.show(result, Console())
    return 0


def simulation_config(wanted: SimulateSettings) -> SimulationConfig:
    coupled = wanted.engine != "mooncake"
    has_limits = wanted.reject or wanted.autoscale is not None
    prefill = wanted.prefill if wanted.prefill is not None else 0 if coupled else 8
    decode = wanted.decode if wanted.decode is not None else 16 if coupled else 8
    return SimulationConfig(
        model=figures(wanted.model, ModelFigures),
        hardware=figures(wanted.hardware, HardwareFigures),
        shape=Shape.parse(wanted.shape) if wanted.shape else None,
        num_prefill=prefill,
        num_decode=decode,
        scheduler=SchedulerConfig(
            fetch_remote=not wanted.local_caches,
            ttft_slo_s=wanted.slo_ttft_s if has_limits else None,
            tbt_slo_s=wanted.slo_tbt_ms / 1e3 if has_limits else None,
            **values_of(wanted, SchedulerConfig),
        ),
        scaling=wanted.autoscale_by if wanted.autoscale is not None else FIXED,
        link_bytes_per_s=wanted.link_gbps * 1e9 / 8 if wanted.link_gbps else None,
        **values_of(wanted, SimulationConfig),
    )


def _workload(wanted: SimulateSettings) -> Workload:
    if wanted.trace is None:
        raise ConfigError(
            "--trace is missing; name a trace, as docs/simulator.md shows", param="trace"
        )
    return Workload.replay(
        read_trace(wanted.trace),
        speed=wanted.speed,
        limit=wanted.limit,
        max_output_tokens=wanted.max_output,
    )


def _under_faults(wanted: SimulateSettings, file: str) -> int:
    """Play faults on the trace's cluster, or on the small one of the seed."""
    faults = None if file == RANDOM else read_faults(file)
    if wanted.trace is None:
        report = Trial(wanted.seed, faults, file).run()
        html = comparison_page(terminal.fault_title(report), terminal.fault_tables(report))
        return _end(wanted, report, html, f"mooncake simulate --faults {file} --seed {wanted.seed}")
    config, console = simulation_config(wanted), Console(stderr=True)
    workload = _workload(wanted)
    run = FaultyRun(config, workload, faults, file)
    with progress("faults", len(workload.arrivals), console) as move:
        report = run.run(move)
    html = comparison_page(terminal.fault_title(report), terminal.fault_tables(report))
    if report.failure is None:
        result = result_of(run.simulation)
        terminal.show(result, Console())
        html = page(result, terminal.fault_tables(report))
    return _end(wanted, report, html, "the same command")


@contextlib.contextmanager
def _no_logs() -> Iterator[None]:
    """Silence the logs: machines under faults are expected to log errors."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _end(wanted: SimulateSettings, report: TrialReport, html: str, command: str) -> int:
    write(wanted.json, as_json(report))
    write(wanted.report, html)
    show_rows(terminal.fault_title(report), report.rows, Console())
    if report.failure is None:
        return 0
    print(describe_failure(report, command))
    return 1


def replay_bundle(file: str, json: str | None) -> int:
    """Print who was chosen for each placement and who is chosen now; 1 where these differ."""
    bundle = read_bundle(file)
    rows = [["request", "attempt", "chosen then", "chosen now"]]
    replayed = []
    same = True
    for entry in bundle.placements:
        then, now = _then(entry.placement), _now(entry.placement)
        same = same and then == now
        rows.append([entry.request_id, str(entry.attempt), then, now])
        replayed.append(
            {"request_id": entry.request_id, "attempt": entry.attempt, "then": then, "now": now}
        )
    write(json, as_json({"receipt": bundle.receipt, "same": same, "placements": replayed}))
    title = f"{bundle.receipt}: " + ("the same workers" if same else "OTHER WORKERS are chosen now")
    show_rows(title, rows, Console())
    return 0 if same else 1


def _then(placement: BundledPlacement) -> str:
    return _pair(placement.prefill, placement.decode)


def _now(placement: BundledPlacement) -> str:
    chosen = replay(placement)
    return NOBODY if chosen is None else _pair(*chosen)


def _pair(prefill: str | None, decode: str) -> str:
    return f"{decode} alone" if prefill is None else f"{prefill} -> {decode}"


COMMANDS = (
    Command(
        words="simulate", settings=SimulateSettings, run=run, takes_file=True,
        examples=EXAMPLES, notes=NOTES,
    ),
)  # fmt: skip
