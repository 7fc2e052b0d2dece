"""What `mooncake simulate --faults` does: faults read or drawn, a run that is checked after every
event, and what came of it.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from mooncake.base import ConfigError
from mooncake.launch.simulation_runs import (
    as_json,
    progress_of,
    show,
    show_rows,
    simulation_config,
    workload_of,
    write,
)
from mooncake.sim.fault_plan import Fault
from mooncake.sim.fault_run import FaultyRun
from mooncake.sim.faults import Trial, TrialReport, describe_failure
from mooncake.sim.report import comparison_page, page
from mooncake.sim.result import result_of

RANDOM = "random"


def simulate_faults(arguments: argparse.Namespace) -> int:
    """Play the faults on the trace's cluster, or on the small one of the seed; 1 when a check
    failed.
    """
    with _silence():
        return _simulate(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    faults = None if arguments.faults == RANDOM else read_faults(arguments.faults)
    if arguments.trace is None:
        report = Trial(arguments.seed, faults, arguments.faults).run()
        command = f"mooncake simulate --faults {arguments.faults} --seed {arguments.seed}"
        return _tell(arguments, report, comparison_page(_title(report), _tables(report)), command)
    config, console = simulation_config(arguments), Console(stderr=True)
    workload = workload_of(arguments)
    run = FaultyRun(config, workload, faults, arguments.faults)
    with progress_of("faults", len(workload.arrivals), console) as progress:
        report = run.run(progress)
    html = comparison_page(_title(report), _tables(report))
    if report.failure is None:
        result = result_of(run.simulation)
        show(result, Console())
        html = page(result, _tables(report))
    return _tell(arguments, report, html, "the same command")


def read_faults(path: str) -> list[Fault]:
    """Return the faults in a YAML list or in JSONL.

    Raises:
        ConfigError: the file cannot be read; the message names the fault that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and all(line.lstrip().startswith("{") for line in lines):
            values = [yaml.safe_load(line) for line in lines]
        else:
            values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}", param="faults") from None
    if not isinstance(values, list):
        raise ConfigError(f"{path}: must hold a list of faults", param="faults")
    faults = []
    for number, value in enumerate(values, 1):
        try:
            faults.append(msgspec.convert(value, Fault))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}, fault {number}: {error}", param="faults") from None
    return faults


@contextmanager
def _silence() -> Iterator[None]:
    """Machines under faults log what they should; nobody wants to read it here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _title(report: TrialReport) -> str:
    return f"{sum(report.faults.values())} faults, seed {report.seed}"


def _tables(report: TrialReport) -> list[tuple[str, Sequence[Sequence[str]], str]]:
    rows = [["after the first request, s", "what"]]
    for line in report.injected:
        at_s, _, what = line.strip().partition("  FAULT ")
        rows.append([at_s, what])
    remark = "Every machine was checked after each of its events, and all of them at the end."
    return [("Outcome", report.rows, remark), ("Faults, as they happened", rows, "")]


def _tell(arguments: argparse.Namespace, report: TrialReport, html: str, command: str) -> int:
    write(arguments.json, as_json(report))
    write(arguments.report, html)
    show_rows(_title(report), report.rows, Console())
    if report.failure is None:
        return 0
    print(describe_failure(report, command))
    return 1
