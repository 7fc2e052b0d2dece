"""`mooncake plan` finds the smallest simulated cluster that keeps a trace inside its limits, or
asks a running one how many replicas it should have now.
"""

from __future__ import annotations

import dataclasses
import time

from rich.console import Console

from mooncake.base import ConfigError, MooncakeError, Shape
from mooncake.cli.command import Command
from mooncake.cli.results import as_json, check_writable, write
from mooncake.cli.status import STATUS_PATH, ServerAddress, replica_table
from mooncake.launch.config.options import values_of
from mooncake.launch.config.shipped import figures
from mooncake.launch.config.sim_settings import PlanSettings
from mooncake.launch.host.http_client import Client
from mooncake.sim import console as terminal
from mooncake.sim.files import read_trace
from mooncake.sim.planning import plan_cluster
from mooncake.sim.results.report import comparison_page
from mooncake.sim.simulation import SimulationConfig
from mooncake.sim.workload import Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures
from mooncake.telemetry.terminal import show_rows

TRIES = 20
"""How often a server that gives no advice yet is asked, once a second. It looks at the cluster ten
seconds after it started.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(PlanSettings, ServerAddress):
    """Settings of `mooncake plan`."""


def run(wanted: Plan) -> int:
    """Try clusters, print and write what was tried; with `live`, what a server advises."""
    check_writable(wanted.json, wanted.report)
    if wanted.live:
        return _live(wanted)
    if wanted.trace is None:
        raise ConfigError(
            "--trace is missing; name a trace, as docs/simulator.md shows", param="trace"
        )
    base = SimulationConfig(
        model=figures(wanted.model, ModelFigures),
        hardware=figures(wanted.hardware, HardwareFigures),
        shape=Shape.parse(wanted.shape) if wanted.shape else None,
        num_prefill=1,
        num_decode=1,
        **values_of(wanted, SimulationConfig),
    )
    workload = Workload.replay(read_trace(wanted.trace), speed=wanted.speed, limit=wanted.limit)
    console = Console(stderr=True)
    tried = plan_cluster(
        base, lambda config: terminal.run(config, workload, console), wanted.max_nodes
    )
    write(wanted.json, as_json(tried))
    rows = terminal.tried_rows(tried)
    title = f"{base.model.name} on {base.hardware.name}: what was tried"
    remark = (
        "Chosen: the fewest instances with 99 % of requests inside both limits. "
        + base.hardware.remark
    )
    plots = [("Requests inside both limits, best split tried", terminal.plan_plot(tried))]
    write(wanted.report, comparison_page(title, [("Clusters", rows, remark)], plots))
    show_rows(title, rows, Console())
    Console().print(base.hardware.remark)
    best = next((one for one in tried if one.chosen), None)
    if best is None:
        raise MooncakeError(f"no cluster of up to {wanted.max_nodes} nodes keeps 99 % inside")
    Console().print(
        f"{best.num_nodes} nodes: {best.num_prefill} prefill and {best.num_decode} decode instances"
    )
    return 0


def _live(wanted: Plan) -> int:
    client = Client(wanted.url, wanted.api_key)
    for left in reversed(range(TRIES)):
        advice = client.get(STATUS_PATH).get("replicas")
        if advice:
            break
        if not left:
            raise MooncakeError(
                f"the server at {wanted.url} gives no advice: it is of an older release, or has no "
                "workers and was asked for nothing since it started"
            )
        time.sleep(1.0)
    write(wanted.json, as_json(advice))
    Console(markup=False).print(replica_table(advice))
    return 0


COMMANDS = (
    Command(
        words="plan", settings=Plan, run=run, takes_file=True,
        examples="mooncake plan --trace trace.jsonl --model llama3-70b --hardware a800x8 \\\n"
        "    --slo-ttft-s 30 --slo-tbt-ms 100\n"
        "mooncake plan --live --url http://127.0.0.1:8000",
    ),
)  # fmt: skip
