"""Tenants, classes of service and roles on made traces, simulated: `python -m benchmarks balance`.

Every cluster is LLaMA3-70B on A800 nodes as `configs/` describes them; the same seed gives the
same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from random import Random

import msgspec
from rich.console import Console
from rich.table import Table

from mooncake.base import FinishReason, Priority
from mooncake.launch.config.shipped import figures
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.measure import RequestMeasure
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine, Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

TTFT_S = 10.0
TBT_S = 0.1
ROLES_TBT_S = 0.03
"""The limit for loads in which roles may change: their gaps are 25 ms at least."""
NUM_SEEDS = 3

Load = tuple[float, tuple[float, float], tuple[int, int], tuple[int, int]]
"""The arguments of `_Trace.add`."""
PROMPTS, OUTPUTS = (6000, 12000), (100, 400)
ROLE_LOADS: dict[str, tuple[Load, ...]] = {
    "prompts, then outputs": (
        (3.6, (0.0, 60.0), PROMPTS, (20, 60)),
        (30.0, (60.0, 120.0), OUTPUTS, (400, 1200)),
    ),
    "outputs, then prompts, no gap to spare": (
        (22.0, (0.0, 40.0), OUTPUTS, (300, 800)),
        (5.0, (40.0, 120.0), PROMPTS, (150, 300)),
    ),
    "both at once, no gap to spare": (
        (4.4, (0.0, 80.0), PROMPTS, (150, 300)),
        (22.0, (0.0, 80.0), OUTPUTS, (300, 900)),
    ),
}

Kind = Callable[[TraceLine], str]


class _Trace:
    """Requests at random times; no prompt is like another."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._next_id = 1
        self.lines: list[TraceLine] = []

    def add(
        self,
        rate: float,
        span_s: tuple[float, float],
        prompt: tuple[int, int],
        output: tuple[int, int],
        *,
        tenant: str = "",
        priority: Priority = Priority.INTERACTIVE,
    ) -> None:
        """Add `rate` requests a second in this span, lengths drawn from these ranges."""
        at_s, end_s = span_s
        while (at_s := at_s + self._random.expovariate(rate)) < end_s:
            length = self._random.randrange(*prompt)
            ids = range(self._next_id, self._next_id - (-length // TRACE_BLOCK_TOKENS))
            self._next_id = ids.stop
            line = TraceLine(
                timestamp=round(1e3 * at_s),
                input_length=length,
                output_length=self._random.randrange(*output),
                hash_ids=list(ids),
                tenant=tenant,
                priority=priority,
            )
            self.lines.append(line)

    def sorted(self) -> list[TraceLine]:
        return sorted(self.lines, key=lambda line: line.timestamp)


def _play(
    trace: Sequence[TraceLine], nodes: tuple[int, int], tbt_s: float = TBT_S, **scheduler: float
) -> list[RequestMeasure]:
    """Return all requests, in order."""
    simulation = Simulation(
        SimulationConfig(
            model=figures("llama3-70b", ModelFigures),
            hardware=figures("a800x8", HardwareFigures),
            num_prefill=nodes[0],
            num_decode=nodes[1],
            scheduler=msgspec.convert(scheduler, SchedulerConfig),
            ttft_slo_s=TTFT_S,
            tbt_slo_s=tbt_s,
            decode_pools=nodes[1] > 2,
        ),
        Workload.replay(trace),
    )
    simulation.run()
    return simulation.measures.requests


def _rows(
    table: Table, what: str, trace: Sequence[TraceLine], kind: Kind, **scheduler: float
) -> None:
    requests = _play(trace, (1, 2), **scheduler)
    kinds = [kind(line) for line in trace]
    for name in dict.fromkeys(sorted(kinds)):
        of_kind = [one for one, its in zip(requests, kinds, strict=True) if its == name]
        _row(table, what, name, of_kind)


def _tenants(table: Table, seed: int) -> None:
    trace = _Trace(seed)
    trace.add(0.2, (0.0, 120.0), (3000, 9000), (10, 40), tenant="quiet")
    trace.add(2.5, (20.0, 60.0), (3000, 9000), (10, 40), tenant="flood")
    lines = trace.sorted()
    names = {line.timestamp: line.tenant for line in lines}
    one_tenant = [msgspec.structs.replace(line, tenant="") for line in lines]

    def kind(line: TraceLine) -> str:
        return names[line.timestamp]

    limits = {"ttft_slo_s": TTFT_S, "tbt_slo_s": TBT_S}
    _rows(table, "a flood of one tenant, no names", one_tenant, kind)
    _rows(table, "a flood of one tenant", lines, kind)
    _rows(table, "the same with limits, no names", one_tenant, kind, **limits)
    _rows(table, "the same with limits", lines, kind, **limits)


def _classes(table: Table, seed: int) -> None:
    def kind(line: TraceLine) -> str:
        return line.priority.value

    alone, beside = _Trace(seed), _Trace(seed)
    for trace in (alone, beside):
        trace.add(0.6, (0.0, 120.0), (3000, 9000), (10, 40))
    beside.add(20.0, (20.0, 23.0), (3000, 9000), (10, 40), priority=Priority.BATCH)
    _rows(table, "interactive alone", alone.sorted(), kind)
    _rows(table, "batch beside interactive", beside.sorted(), kind)
    overload = _Trace(seed)
    for priority in Priority:
        overload.add(0.9, (0.0, 60.0), (3000, 9000), (10, 40), priority=priority)
    limits = {"ttft_slo_s": TTFT_S, "tbt_slo_s": TBT_S}
    _rows(table, "too much of three classes, limits", overload.sorted(), kind, **limits)


def _roles(table: Table, seed: int) -> None:
    limits = {"ttft_slo_s": TTFT_S, "tbt_slo_s": ROLES_TBT_S}
    for name, loads in ROLE_LOADS.items():
        for number in range(seed, seed + NUM_SEEDS):
            trace = _Trace(number)
            for load in loads:
                trace.add(*load)
            for switching in (False, True):
                requests = _play(
                    trace.sorted(), (4, 4), ROLES_TBT_S,
                    role_switching=switching, role_switch_after_s=15.0, **limits,
                )  # fmt: skip
                kind = "roles change" if switching else "fixed roles"
                _row(table, f"{name}, seed {number}", kind, requests, ROLES_TBT_S)


def _row(
    table: Table, what: str, kind: str, requests: Sequence[RequestMeasure], tbt_s: float = TBT_S
) -> None:
    ttfts = [one.ttft_s for one in requests if one.ttft_s is not None]
    served = sum(one.final is FinishReason.STOP for one in requests)
    inside = sum(
        one.final is FinishReason.STOP
        and one.ttft_s is not None
        and one.ttft_s <= TTFT_S
        and one.slow_gap_s <= tbt_s
        for one in requests
    )
    mean_s = sum(ttfts) / len(ttfts) if ttfts else 0.0
    table.add_row(what, kind, str(len(requests)), str(served), str(inside), f"{mean_s:.2f}")


def main(argv: list[str]) -> int:
    """Run all and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks balance", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("tenants", "classes", "roles"))
    arguments = parser.parse_args(argv)
    table = Table(title=f"LLaMA3-70B on A800 nodes, simulated; limits {TTFT_S:g} s to the first")
    for name in ("load", "of", "requests", "served", "inside limits", "mean TTFT s"):
        table.add_column(name, justify="left" if name in ("load", "of") else "right")
    for name, part in (("tenants", _tenants), ("classes", _classes), ("roles", _roles)):
        if arguments.only in (None, name):
            part(table, arguments.seed)
    table.caption = figures("a800x8", HardwareFigures).remark
    Console(width=120).print(table)
    return 0
