"""`mooncake status`: what the server says of its workers, as a table or as it came."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from mooncake.launch.client import Client

STATUS_PATH = "/v1/cluster/status"


def show(url: str, api_key: str | None, *, as_json: bool) -> int:
    """Print the status of the server at `url` and return the exit code.

    Raises:
        MooncakeError: no server answers, or it refuses.
    """
    answer = Client(url, api_key).get(STATUS_PATH)
    if as_json:
        json.dump(answer, sys.stdout, indent=2)
        print()
        return 0
    console = Console()
    console.print(gateway_table(answer.get("gateways", [])))
    console.print(worker_table(answer.get("workers", [])))
    for name, value in answer.items():
        if name not in ("gateways", "workers"):
            console.print(f"{name}: {_flat(value)}")
    return 0


def gateway_table(gateways: list[dict[str, Any]]) -> Table:
    """Return one row a gateway, the one that answered first."""
    table = Table(box=None, pad_edge=False)
    columns = {"gateway": "id", "address": "address", "state": "state", "requests": "num_inflight"}
    for title in columns:
        table.add_column(title)
    for gateway in gateways:
        table.add_row(*(str(gateway.get(name, "")) for name in columns.values()))
    return table


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """Return one row a worker: who it is, what it does, how full it is."""
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "role", "pid", "host", "state", "running", "waiting", "free blocks"):
        table.add_column(name)
    for worker in workers:
        load = worker.get("load") or {}
        table.add_row(
            *(str(worker.get(name, "")) for name in ("id", "role", "pid", "host", "state")),
            *(str(load.get(name, 0)) for name in ("num_running", "num_waiting")),
            f"{load.get('num_free_blocks', 0)} of {load.get('num_total_blocks', 0)}",
        )
    return table


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    return (", ".join(map(str, value)) or "-") if isinstance(value, list) else str(value)
