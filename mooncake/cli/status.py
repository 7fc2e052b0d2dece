"""`mooncake status` shows the workers, gateways and load of a server, as tables or JSON. `mooncake
top` is `mooncake status --watch` under the name that people look for.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from mooncake.base import format_bytes
from mooncake.base.errors import Forbidden, MooncakeError, UserError
from mooncake.cli.command import Command
from mooncake.launch.config.options import positive, setting, text, truth
from mooncake.launch.host import machine_facts
from mooncake.launch.host.environment import is_loopback
from mooncake.launch.host.http_client import Client
from mooncake.telemetry.terminal import plain_table

STATUS_PATH = "/v1/cluster/status"
DEFAULT_URL = "http://127.0.0.1:8000"
SERVER = "server"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Settings of all commands that ask a server."""

    # fmt: off
    url: str = setting(DEFAULT_URL, text, SERVER, "URL", "URL of the server")
    api_key: str | None = setting(None, text, SERVER, "KEY", "API key, if the server asks for one",
        env="MOONCAKE_API_KEY", other_env="OPENAI_API_KEY", secret=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(ServerAddress):
    json: bool = setting(False, truth, "output", "", "print what the server answers")
    watch: float | None = setting(
        None,
        positive,
        "output",
        "S",
        "ask again every S seconds, until Ctrl-C; a server that does not answer is asked again, "
        "too",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top(ServerAddress):
    interval: float = setting(2.0, positive, "output", "S", "seconds between two questions")


def show(wanted: Status) -> int:
    """Print the status of a server; with `watch`, again and again."""
    client, console = Client(wanted.url, wanted.api_key), Console(markup=False)
    if wanted.watch is None:
        _show(client.get(STATUS_PATH), console, as_json=wanted.json)
        return 0
    rates = Rates()
    while True:
        try:
            answer = client.get(STATUS_PATH)
        except (Forbidden, UserError):
            raise  # a wrong key, which is no better in a while
        except MooncakeError as error:
            _clear(console, as_json=wanted.json)
            print(f"mooncake: {error.message}", file=sys.stderr, flush=True)
        else:
            _clear(console, as_json=wanted.json)
            rates.take(answer.get("workers", []), time.monotonic())
            _show(answer, console, as_json=wanted.json, rates=rates)
        time.sleep(wanted.watch)


def show_again(wanted: Top) -> int:
    """Show the workers until Ctrl-C."""
    return show(Status(url=wanted.url, api_key=wanted.api_key, watch=wanted.interval))


def _clear(console: Console, *, as_json: bool) -> None:
    """Clear a terminal. Elsewhere one answer follows the other."""
    if console.is_terminal and not as_json:
        console.clear()
    elif not as_json:
        console.print(time.strftime("%H:%M:%S"))


class Rates:
    """What each worker did in a second, between the last two answers of a server."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._counts: dict[tuple[str, int], dict[str, float]] = {}
        self._shown: dict[str, list[str]] = {}

    def take(self, workers: list[dict[str, Any]], now_s: float) -> None:
        """Record an answer. A process that is new, or was restarted, has no rates yet."""
        passed_s, before, self._shown = now_s - self._at_s, self._counts, {}
        self._at_s, self._counts = now_s, {}
        for worker in workers:
            name, counts = str(worker.get("id", "")), _counters(worker)
            process = name, int(worker.get("pid", 0))
            self._counts[process] = counts
            if process in before and passed_s > 0:
                self._shown[name] = [
                    _rate(counts, before[process], passed_s, kinds) for kinds in _RATES.values()
                ]

    def of(self, worker: dict[str, Any]) -> list[str]:
        """Return the cells of one worker, one for each of `_RATES`."""
        return self._shown.get(str(worker.get("id", "")), [""] * len(_RATES))


_RATES = {
    "new/s": {"tokens_computed": "tokens", "blocks_put": "blocks"},
    "reused/s": {"tokens_reused": "tokens", "blocks_hit": "blocks"},
}
"""Column -> the counters whose growth it shows, engines' first, each with its unit."""


def _rate(
    counts: dict[str, float], before: dict[str, float], passed_s: float, kinds: dict[str, str]
) -> str:
    found = next(((name, unit) for name, unit in kinds.items() if name in counts), None)
    if found is None:
        return ""
    name, unit = found
    return f"{(counts[name] - before.get(name, 0.0)) / passed_s:,.0f} {unit}"


def _show(
    answer: dict[str, Any], console: Console, *, as_json: bool, rates: Rates | None = None
) -> None:
    if as_json:
        json.dump(answer, sys.stdout, indent=2)
        print(flush=True)
        return
    console.print(gateway_table(answer.get("gateways", [])))
    if "engines" in answer:
        console.print(engine_table(answer["engines"]))
    else:
        console.print(worker_table(answer.get("workers", []), rates))
    if advice := answer.get("replicas"):
        console.print(replica_table(advice))
    for name, value in answer.items():
        if name not in ("gateways", "workers", "engines", "replicas") and (
            value or name == "ready"
        ):
            console.print(f"{_title(name)}: {_in_words(name, value)}")


def gateway_table(gateways: list[dict[str, Any]]) -> Table:
    """Return one row for each gateway. The one that answered comes first."""
    columns = {"gateway": "id", "address": "address", "state": "state", "requests": "num_inflight"}
    table = plain_table(*columns)
    for gateway in gateways:
        table.add_row(*(str(gateway.get(name, "")) for name in columns.values()))
    return table


def worker_table(workers: list[dict[str, Any]], rates: Rates | None = None) -> Table:
    """Return one row for each worker: its name and place, its state, its load, its `rates`, its
    health port. Where they exist, it also shows what became of its drafts, how even the load of its
    shared experts is, and which of its stages was slow.
    """
    told = {"drafts accepted": _drafts, "experts": _experts, "stages": _stages}
    shown = {name: of for name, of in told.items() if any(map(of, workers))}
    table = plain_table(
        "worker", "role", "pid", "host", "state", "running", "waiting", "KV used",
        *(_RATES if rates is not None else ()), *shown, "health", right=_RATES,
    )  # fmt: skip
    for worker in workers:
        load = worker.get("load") or {}
        table.add_row(
            *(str(worker.get(name, "")) for name in ("id", "role", "pid", "host", "state")),
            *(str(load.get(name, 0)) for name in ("num_running", "num_waiting")),
            _used(load),
            *(rates.of(worker) if rates is not None else ()),
            *(of(worker) for of in shown.values()),
            _health(worker),
        )
    return table


def replica_table(advice: list[dict[str, Any]]) -> Table:
    """Return one row for each role: how many replicas it has, how many are wanted, and why."""
    columns = ("role", "now", "wanted", "why")
    table = plain_table("replicas of", *columns[1:], right=("now", "wanted"))
    for each in advice:
        table.add_row(*(str(each.get(name, "")) for name in columns))
    return table


def engine_table(engines: list[dict[str, Any]]) -> Table:
    """Return one row for each of other people's engines: its state, its load from this gateway,
    which part of its prompts it had cached, how its prefixes are known, and its models or why it
    is not up.
    """
    table = plain_table(
        "engine", "state", "running", "waiting", "requests", "failed", "cached", "by", "serves"
    )
    for engine in engines:
        computed = engine.get("num_prompt_tokens", 0)
        prefixes = str(engine.get("prefixes", ""))
        if prefixes == "events":
            prefixes = f"events, {engine.get('num_blocks', 0)} blocks"
        table.add_row(
            *(str(engine.get(name, "")) for name in ("url", "state")),
            *(str(engine.get(f"num_{name}", 0)) for name in (
                "running", "waiting", "requests", "failed",
            )),
            f"{engine.get('num_cached_tokens', 0) / computed:.0%}" if computed else "",
            prefixes,
            str(engine.get("reason") or ", ".join(engine.get("models", []))),
        )  # fmt: skip
    return table


def _counters(worker: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = (worker.get("load") or {}).get("counters") or {}
    return found


def _health(worker: dict[str, Any]) -> str:
    """Return where a worker's health port is; on loopback, only its own machine reaches it."""
    url, host = str(worker.get("health_url", "")), str(worker.get("host", ""))
    is_there = is_loopback(urlsplit(url).hostname or "") and host != machine_facts.host_name()
    return url.removeprefix("http://") + (f" on {host}" if is_there else "")


def _used(load: dict[str, Any]) -> str:
    """Return the share of its blocks that are not free. A pool node's free blocks hold nothing."""
    total, free = load.get("num_total_blocks", 0), load.get("num_free_blocks", 0)
    return f"{(total - free) / total:.0%} of {total} blocks" if total else ""


_POSITIONS_SHOWN = 4
"""Number of draft positions that are shown; later drafts are rarely accepted."""


def _drafts(worker: dict[str, Any]) -> str:
    """Return the share of its drafts that were accepted, how many tokens a step with drafts gave,
    and for these steps the share in which the first, second... draft was accepted. Empty for a
    worker that has computed none.
    """
    counters = _counters(worker)
    num_drafts, num_tokens, num_accepted = (
        counters.get(f"spec_decode_num_{name}", 0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not num_drafts or not num_tokens:
        return ""
    shown = f"{num_accepted / num_tokens:.0%}, {1 + num_accepted / num_drafts:.2f} tokens a step"
    prefix = "spec_decode_num_accepted_tokens_per_pos_"
    num_at = [counters.get(f"{prefix}{position}", 0) for position in range(_POSITIONS_SHOWN)]
    shares = " ".join(f"{number / num_drafts:.0%}" for number in num_at if number)
    return f"{shown} ({shares})" if shares else shown


def _experts(worker: dict[str, Any]) -> str:
    """Return how even the load of the ranks is that share experts with this worker (mean over
    maximum), and the share of the hottest expert. Also return how long the others waited for this
    worker, and which of them was slow or silent. Empty for a worker that shares none, or has
    counted no rows yet.
    """
    counters = _counters(worker)
    most, rows = counters.get("expert_rank_rows_most"), counters.get("expert_rows")
    if not most or not rows:
        return ""
    balance, hottest = counters["expert_rank_rows_mean"] / most, counters["expert_rows_hottest"]
    told = f"balance {balance:.2f}, hottest {hottest / rows:.0%}"
    if moves := counters.get("expert_moves"):
        told += f", {moves:.0f} moves"
    if "expert_waited_for_s" in counters:
        told += f", waited for {counters['expert_waited_for_s']:.1f} s"
    silent, slow = "expert_silent_s_", "expert_slow_s_"
    for name, value in counters.items():
        if name.startswith(slow) and value:
            told += f", {name.removeprefix(slow)} was slow, waited {value:.0f} s for it"
        if name.startswith(silent) and value:
            told += f", {name.removeprefix(silent)} was silent for {value:.0f} s"
    return told


def _stages(worker: dict[str, Any]) -> str:
    """Return which stages of a worker were slow; empty if none was."""
    counters = _counters(worker)
    slow = "stage_slow_s_"
    return ", ".join(
        f"{name.removeprefix(slow)} was slow, waited {value:.0f} s for it"
        for name, value in counters.items()
        if name.startswith(slow) and value
    )


def _title(name: str) -> str:
    return name.removeprefix("num_").removesuffix("_bytes").replace("_", " ")


def _in_words(name: str, value: Any) -> str:
    """Return the value of a field as text: the fields of an object, and bytes in their unit."""
    match value:
        case dict():
            return ", ".join(
                f"{_in_words(each, number)} {_title(each)}" for each, number in value.items()
            )
        case list():
            return ", ".join(map(str, value))
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_bytes"):
            return format_bytes(value)
        case int():
            return f"{value:,}"
    return str(value)


COMMANDS = (
    Command(
        words="status", settings=Status, run=show,
        examples="mooncake status\nmooncake status --json | jq '.workers[].pid'",
    ),
    Command(
        words="top", settings=Top, run=show_again,
        examples="mooncake top\nmooncake top --interval 0.5",
        notes="Rates are those since the last question. Of an engine: tokens computed (new) and "
        "found in caches\n(reused); of a pool node: blocks stored (new) and read (reused).",
    ),
)  # fmt: skip
