"""Prints what `mooncake serve` shows: progress bars while workers start, then one table; for a dry
run, the plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake.base import Role, format_bytes
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.rank_plan import InstanceMemory, rank_rows
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.telemetry.terminal import plain_table

Show = Callable[[str, str, int, int], None]
"""Called with (worker id, what it is doing, how much is done, of how much); a total of 0 is not
counted.
"""

READY = "ready"
"""The activity shown for a worker that has started."""


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    worker_id: str
    role: Role
    pid: int
    node_id: str
    holds: str


class StartProgress:
    """Shows a progress bar for each worker until all are up. Use it as a context; call the value to
    show progress.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.fields[worker]:<12}"),
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Show:
        self._bars.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _show(self, worker_id: str, what: str, done: int, whole: int) -> None:
        task = self._tasks.get(worker_id)
        if task is None:
            task = self._bars.add_task(what, worker=worker_id, total=None)
            self._tasks[worker_id] = task
        if what == READY:
            done = whole = 1
        self._bars.update(task, description=what, completed=done, total=whole or None)


def holdings(plan: ServePlan, role: Role) -> str:
    """Return what memory a worker of `role` holds, for the table."""
    if role is Role.KVSTORE:
        blocks = plan.kvstore.dram_bytes // plan.layout.block_bytes
        disks = "".join(
            f", {format_bytes(disk.num_bytes)} in {disk.directory}" for disk in plan.kvstore.ssd
        )
        if plan.kvstore.object_store is not None:
            disks += f", and the bucket {plan.kvstore.object_store.bucket}"
        return f"pool of {format_bytes(plan.kvstore.dram_bytes)} DRAM, {blocks} blocks{disks}"
    memory = plan.ranks[role]
    shape = memory.shape
    tokens = max(0, memory.num_pages) * shape.dcp * plan.layout.block_tokens
    ranks = "" if shape.num_ranks == 1 else f"{shape.num_ranks} ranks ({shape}), "
    num_threads = plan.options.num_threads
    plural = "" if num_threads == 1 else "s"
    threads = "" if plan.gpu_node is not None else f", {num_threads} thread{plural}"
    if role is Role.EXPERTS:
        return f"{format_bytes(memory.sum(lambda rank: rank.weights))} of routed experts{threads}"
    kv = format_bytes(memory.sum(lambda rank: rank.kv))
    return f"{ranks}{kv} KV, {tokens} tokens{threads}"


def worker_rows(
    plan: ServePlan, workers: Iterable[WorkerSettings], pids: Mapping[str, int]
) -> list[WorkerRow]:
    """Return the rows of workers that have started."""
    return [
        WorkerRow(
            each.worker_id, each.role, pids[each.worker_id], each.node_id,
            holdings(plan, each.role),
        )
        for each in workers
    ]  # fmt: skip


def started_table(rows: list[WorkerRow]) -> Table:
    table = plain_table("role", "worker", "pid", "node", "holds")
    for row in rows:
        table.add_row(row.role.value, row.worker_id, str(row.pid), row.node_id, row.holds)
    return table


def print_plan(
    console: Console, config: ServeConfig, plan: ServePlan, available: int | None
) -> None:
    """Print the settings that have a value, the workers and their memory."""
    settings = plain_table("setting", "value", title="configuration")
    for name, value in config.shown().items():
        if value or value == 0:  # what is unset, or an empty list, says nothing
            settings.add_row(name, json.dumps(value, ensure_ascii=False))
    console.print(settings)
    workers = plain_table("role", "number", "each holds", title="workers")
    for role, number in (*plan.engines, (Role.KVSTORE, plan.num_kvstores)):
        if number:
            workers.add_row(role.value, str(number), holdings(plan, role))
    console.print()
    console.print(workers)
    if plan.engines:
        console.print(f"\nsteps of up to {plan.steps.number} tokens: {plan.steps.why}")
    if plan.gpu_node is not None and plan.refusal:
        words = f"\n`serve` on one machine of {plan.gpu_node.name} refuses this: {plan.refusal}"
        console.print(words, soft_wrap=True, highlight=False)
    shown: list[InstanceMemory] = []
    for role, _ in plan.engines:
        memory = plan.ranks[role]
        several = memory.shape.num_ranks > 1 or plan.gpu_node is not None
        if several and memory not in shown:
            shown.append(memory)
            console.print()
            console.print(_rank_table(plan, role))
    if plan.gpu_node is not None:
        return
    table = plain_table("what", "each", "together", title="memory on this machine")
    for cells in plan.memory_rows():
        table.add_row(*cells)
    if available is not None:
        table.add_row("free now", "", format_bytes(available))
    console.print()
    console.print(table)


def _rank_table(plan: ServePlan, role: Role) -> Table:
    """Return the memory of each rank of an engine. If a GPU is planned for, KV is what remains of
    its memory.
    """
    node, memory = plan.gpu_node, plan.ranks[role]
    shape = memory.shape
    number = sum(each for other, each in plan.engines if plan.ranks[other] == memory)
    where = "on this machine" if node is None else f"on {node.name}"
    if node is not None:
        nodes = -(-number * shape.pp // (node.num_gpus // shape.tp))
        engines = f"{number} engine{'s' * (number > 1)}"
        where += f", {engines} on {nodes} node{'s' * (nodes > 1)}"
    of_whom = "a worker with the experts" if memory.only_experts else "an engine"
    title = f"memory of each rank of {of_whom} of {shape}, {where}"
    names = ["rank", "weights", "KV", "tokens", "steps", "exchange", "libraries", "sum", "of"]
    if shape.pp > 1:
        names.insert(1, "layers")
    if memory.stages[-1].dram:
        names.append("experts in DRAM")
    table = plain_table(*names, title=title, right=names)
    for cells in rank_rows(memory, plan.layout):
        table.add_row(*cells)
    return table
