"""`mooncake explain`: the receipt of one call, as tables and a timeline, JSON, or a bundle."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mooncake.cli.command import Command
from mooncake.cli.results import write
from mooncake.cli.status import ServerAddress
from mooncake.launch.config.options import setting, text, truth
from mooncake.launch.host.http_client import Client
from mooncake.telemetry.terminal import plain_table

BAR_CHARS = 32
NOTES = """\
The name is the answer's header X-Mooncake-Receipt, or its `id`. A gateway keeps the receipts of its
last calls (--max-receipts). A key sees the calls of its own tenant, an operator's key all. Bundles
tell of all workers, so they need an operator's key.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain(ServerAddress):
    # fmt: off
    name: str = setting("", text, "call", "REQUEST_ID", "its receipt, or the id of its answer",
        positional=True, required=True)
    json: bool = setting(False, truth, "output", "", "print what the server answers")
    bundle: str | None = setting(None, text, "output", "FILE",
        "write the facts of its placements here, for `mooncake simulate --replay`")
    # fmt: on


def explain(wanted: Explain) -> int:
    """Print the receipt of a call, or write its bundle."""
    client = Client(wanted.url, wanted.api_key)
    name = urllib.parse.quote(wanted.name, safe="")
    if wanted.bundle is not None:
        _write(wanted.bundle, client.get(f"/v1/cluster/bundles/{name}"))
        return 0
    receipt = client.get(f"/v1/requests/{name}/receipt")
    if wanted.json:
        json.dump(receipt, sys.stdout, indent=2)
        print(flush=True)
        return 0
    show(receipt, Console(markup=False, highlight=False))
    return 0


def _write(name: str, bundle: dict[str, Any]) -> None:
    write(name, json.dumps(bundle, indent=1) + "\n")
    number = len(bundle.get("placements", ()))
    print(f"{name}: {number} placements; mooncake simulate --replay {name} chooses again")


def show(receipt: dict[str, Any], console: Console) -> None:
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(receipt["begun_at"]))
    tenant = f", tenant {receipt['tenant']}" if receipt["tenant"] else ""
    console.print(f"{receipt['id']}  {receipt['call_id']}  {begun}{tenant}")
    for sequence in receipt["sequences"]:
        console.print()
        _show_sequence(sequence, console)
    left_out = receipt["num_sequences"] - len(receipt["sequences"])
    if left_out:
        console.print(f"\n{left_out} more sequences are not kept")


def _show_sequence(sequence: dict[str, Any], console: Console) -> None:
    console.print(f"{sequence['request_id']}: {_ended(sequence)}")
    if sequence["attempts"]:
        console.print(_figures(sequence))
    if sequence["choice"] is not None:
        _show_choice(sequence["choice"], console)
    for attempt in sequence["attempts"]:
        console.print()
        workers = attempt["decode"] if attempt["prefill"] is None else (
            f"{attempt['prefill']} -> {attempt['decode']}"
        )  # fmt: skip
        lost = f"; lost: {attempt['lost']}" if attempt["lost"] else ""
        console.print(f"attempt {attempt['number']}: {workers}{lost}")
        if attempt["choice"] is not None:
            _show_choice(attempt["choice"], console)
    if sequence["steps"]:
        console.print()
        console.print(_timeline(sequence["steps"]))
    if sequence["num_left_out"]:
        console.print(f"{sequence['num_left_out']} events were too many and are not kept")


def _ended(sequence: dict[str, Any]) -> str:
    if sequence["refused"] is not None:
        limits = [
            f"{what} {_seconds(sequence[name])}"
            for what, name in (("first token", "ttft_slo_s"), ("gaps", "tbt_slo_s"))
            if sequence[name] is not None
        ]
        shown = f"; limits: {', '.join(limits)}" if limits else ""
        return f"refused with {sequence['status']}: {sequence['refused']}{shown}"
    tokens = f"{sequence['num_prompt_tokens']} prompt tokens, {sequence['num_output_tokens']} new"
    failed = f" ({sequence['status']})" if sequence["status"] >= 400 else ""
    return f"{sequence['state']}{failed}; {tokens}"


def _figures(sequence: dict[str, Any]) -> Table:
    """Return what was predicted by the attempt that gave the first token, and what came."""
    attempts = sequence["attempts"]
    attempt = next((each for each in attempts if each["ttft_s"] is not None), attempts[-1])
    table = plain_table("", "predicted", "measured", "limit")
    table.add_row(
        "first token after",
        _seconds(attempt["predicted_ttft_s"]),
        _seconds(attempt["ttft_s"]),
        _seconds(sequence["ttft_slo_s"]),
    )
    longest = sequence["longest_gap_s"]
    table.add_row(
        "a token every",
        _seconds(attempt["predicted_tbt_s"]),
        _seconds(sequence["tbt_s"]) + (f", longest {_seconds(longest)}" if longest else ""),
        _seconds(sequence["tbt_slo_s"]),
    )
    cache = sequence["cache"]
    table.add_row(
        "prompt tokens reused",
        str(attempt["num_predicted_cached_tokens"]),
        _parts(cache["hits"]) if cache is not None else "",
    )
    if cache is not None:
        table.add_row("computed, because", "", _parts(cache["misses"]))
    return table


def _show_choice(choice: dict[str, Any], console: Console) -> None:
    table = plain_table(
        "for the prompt", "first token", "queue", "fetch", "compute", "reused tokens"
    )
    for each in choice["prefill"]:
        first_s, queue_s, fetch_s, compute_s = (
            _seconds(each[name]) for name in ("ttft_s", "queue_s", "fetch_s", "compute_s")
        )
        if each["fetch_blocks"]:
            fetch_s += f", blocks: {_parts(each['fetch_blocks'])}"
        table.add_row(
            _worker(each), first_s, queue_s, fetch_s, compute_s, str(each["num_cached_tokens"])
        )
    console.print(table)
    table = plain_table("for decoding", "a token every", "push", "room")
    for each in choice["decode"]:
        short = f"{each['num_short_blocks']} blocks short" if each["num_short_blocks"] else "yes"
        room = "full" if each["full"] else short
        table.add_row(_worker(each), _seconds(each["tbt_s"]), _seconds(each["push_s"]), room)
    console.print(table)
    for name, role in (("prefill", "prompt"), ("decode", "decoding")):
        more = choice[f"num_{name}"] - len(choice[name])
        if more:
            console.print(f"{more} more were compared for the {role}")
    for worker, why in choice["unusable"].items():
        console.print(f"{worker} was not compared: {why}")


def _timeline(steps: Sequence[dict[str, Any]]) -> Table:
    """Return the steps with a bar for each, from the beginning of the call to the last end."""
    last_s = max(step["end_s"] if step["end_s"] is not None else step["start_s"] for step in steps)
    table = plain_table("from", "to", "", "", "")
    for step in steps:
        end_s = step["end_s"]
        first = _column(step["start_s"], last_s)
        stop = BAR_CHARS if end_s is None else max(first + 1, _column(end_s, last_s))
        facts = ", ".join(f"{name} {value}" for name, value in step["facts"].items())
        table.add_row(
            _seconds(step["start_s"]),
            _seconds(end_s),
            " " * first + "#" * (stop - first) + " " * (BAR_CHARS - stop),
            f"{step['name']}, {step['worker'] or 'gateway'}",
            facts,
        )
    return table


def _column(at_s: float, last_s: float) -> int:
    """Return where a moment is in a bar: below `BAR_CHARS`, so that each step shows."""
    share = at_s / last_s if last_s > 0 else 0.0
    return min(BAR_CHARS - 1, max(0, int(share * BAR_CHARS)))


def _worker(estimate: dict[str, Any]) -> str:
    return f"* {estimate['worker']}" if estimate["taken"] else f"  {estimate['worker']}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _parts(counts: dict[str, int]) -> str:
    """Return the counts that are not 0, with their names."""
    named = [f"{number} {name.replace('_', ' ')}" for name, number in counts.items() if number]
    return ", ".join(named) or "0"


COMMANDS = (
    Command(
        words="explain", settings=Explain, run=explain, notes=NOTES,
        examples="mooncake explain gateway-1b2c3d4e\n"
        "mooncake explain chatcmpl-6f1c --json | jq '.sequences[].attempts'\n"
        "mooncake explain gateway-1b2c3d4e --bundle bundle.json",
    ),
)  # fmt: skip
