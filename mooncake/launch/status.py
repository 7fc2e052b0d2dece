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
    console.print(worker_table(answer.get("workers", [])))
    rest = {name: value for name, value in answer.items() if name != "workers"}
    for name, value in rest.items():
        console.print(f"{name}: {value if not isinstance(value, dict) else _flat(value)}")
    return 0


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """Return one row a worker; columns beside the usual ones come as the server names them."""
    first = ["id", "role", "pid", "host", "state"]
    names = first + sorted({name for worker in workers for name in worker} - {*first, "counters"})
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for worker in workers:
        table.add_row(*(_cell(worker.get(name)) for name in names))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return _flat(value)
    return "" if value is None else str(value)


def _flat(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in values.items())
