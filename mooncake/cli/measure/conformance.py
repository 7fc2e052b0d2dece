"""`mooncake conformance` checks a server for problems that users report of disaggregated servers.
The work is done by `bench.conformance`; here are the lines and the exit code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from mooncake.base import ConfigError, MooncakeError
from mooncake.bench.conformance.complaints import CHECKS, COMPLAINTS
from mooncake.cli.command import Command
from mooncake.launch.config.bench_settings import BenchServe
from mooncake.launch.config.options import (
    SomeOf,
    count,
    counts,
    positive,
    same_as,
    setting,
    text,
    truth,
)

if TYPE_CHECKING:
    from mooncake.bench.conformance.endpoint import Endpoint
    from mooncake.bench.conformance.processes import Processes
    from mooncake.bench.conformance.verdict import Verdict

CLOSING_S = 0.1
"""Seconds for connections that were broken off to be closed."""
SERVER, PROCESSES, CHECK, RESULT = "server", "processes", "checks", "result"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conformance:
    # fmt: off
    base_url: str = setting("http://127.0.0.1:8000", text, SERVER, "URL", "URL of the server",
        short="--url")
    api_key: str | None = same_as(BenchServe, "api_key", SERVER)
    insecure: bool = same_as(BenchServe, "insecure", SERVER)
    model: str | None = same_as(BenchServe, "model", SERVER)
    other_url: str | None = setting(None, text, SERVER, "URL",
        "another server with the same weights, not disaggregated or in another shape; answers are "
        "compared, and short prompts are timed")
    prefill_url: str | None = setting(None, text, SERVER, "URL",
        "the server's prefill worker, if clients get kv_transfer_params from it")
    kv_gauge: str | None = setting(None, text, SERVER, "NAME",
        "gauge in /metrics of the KV in use (default: those of Mooncake, vLLM and SGLang)")
    processes: bool = setting(False, truth, PROCESSES, "",
        "also kill, stop and replace processes of the server, which must run on this machine")
    prefill_pid: tuple[int, ...] = setting((), counts, PROCESSES, "PID,…",
        "prefill processes (default: those that a Mooncake server names)")
    decode_pid: tuple[int, ...] = setting((), counts, PROCESSES, "PID,…", "decode processes")
    prefill_command: str | None = setting(None, text, PROCESSES, "COMMAND",
        "command that starts the process of --prefill-pid again")
    decode_command: str | None = setting(None, text, PROCESSES, "COMMAND",
        "command that starts the process of --decode-pid again")
    stop_s: float = setting(40.0, positive, PROCESSES, "S", "seconds for which prefill is stopped")
    replacements: int = setting(5, count(1), PROCESSES, "N",
        "number of times that a prefill process is replaced")
    checks: tuple[str, ...] = setting(tuple(CHECKS), SomeOf(*CHECKS), CHECK, "ID,…",
        "checks to run")
    deadline_s: float = setting(60.0, positive, CHECK, "S",
        "a request that has not ended after this many seconds counts as hanging")
    prompt_tokens: int = setting(512, count(128), CHECK, "N", "length of the longest usual prompt")
    output_tokens: int = setting(32, count(8), CHECK, "N", "length of the usual answer")
    lease_s: float = setting(45.0, positive, CHECK, "S",
        "seconds after which a handle of --prefill-url has expired")
    seed: int | None = setting(None, count(0), CHECK, "N",
        "seed of the prompts (default: random, so that no cache knows them)")
    json: bool = setting(False, truth, RESULT, "", "print one JSON document instead of lines")
    # fmt: on


def run(wanted: Conformance) -> int:
    """Run the checks. Return 1 if one fails."""
    from mooncake.api.http.event_loop import run_in_loop

    # SIGTERM ends it as Ctrl-C does, so that a process that a check has stopped goes on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        processes = _processes(wanted)
        return run_in_loop(_run(wanted, processes))
    except MooncakeError as error:
        if wanted.json:
            print(json.dumps({"error": {"message": COMMANDS[0].spelled(error.message)}}))
        raise


def _processes(wanted: Conformance) -> Processes | None:
    from mooncake.bench.conformance.processes import Processes

    pids = {"prefill": list(wanted.prefill_pid), "decode": list(wanted.decode_pid)}
    if not wanted.processes:
        if any(pids.values()):
            raise ConfigError("prefill-pid, decode-pid: processes are killed only with --processes")
        return None
    commands = {"prefill": wanted.prefill_command, "decode": wanted.decode_command}
    return Processes(pids, {role: word for role, word in commands.items() if word is not None})


async def _run(wanted: Conformance, processes: Processes | None) -> int:
    from mooncake.bench.conformance import suite
    from mooncake.bench.conformance.target import Target

    main = await _endpoint(wanted, wanted.base_url)
    prefill, other = [
        None if url is None else await _endpoint(wanted, url)
        for url in (wanted.prefill_url, wanted.other_url)
    ]
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    target = Target(
        main=main, prefill=prefill, other=other, processes=processes, draw=Random(seed),
        kv_gauge=wanted.kv_gauge, deadline_s=wanted.deadline_s,
        prompt_tokens=wanted.prompt_tokens, output_tokens=wanted.output_tokens,
        stop_s=wanted.stop_s, lease_s=wanted.lease_s, num_replacements=wanted.replacements,
    )  # fmt: skip
    verdicts: list[Verdict] = []
    try:
        async for verdict in suite.run(target, wanted.checks):
            why = COMMANDS[0].spelled(verdict.why)
            verdicts.append(msgspec.structs.replace(verdict, why=why))
            if not wanted.json:
                print(_line(verdicts[-1]), flush=True)
    finally:
        for endpoint in (main, prefill, other):
            if endpoint is not None:
                endpoint.close()
        await asyncio.sleep(CLOSING_S)
    if wanted.json:
        json.dump(_document(wanted.base_url, main.model, seed, verdicts), sys.stdout, indent=1)
        print()
    return int(any(verdict.result == "fail" for verdict in verdicts))


async def _endpoint(wanted: Conformance, url: str) -> Endpoint:
    """Return an endpoint with the model that it serves. Raises Unavailable when it lists none."""
    from mooncake.api.http.client import HttpClient
    from mooncake.bench.conformance.endpoint import Endpoint
    from mooncake.bench.serve import first_model

    headers = {"Authorization": f"Bearer {wanted.api_key}"} if wanted.api_key else {}
    model = wanted.model
    if model is None:
        client = HttpClient(url, insecure=wanted.insecure)
        try:
            model = await first_model(client, headers)
        finally:
            client.close()
    return Endpoint(url, model, headers, insecure=wanted.insecure)


def _line(verdict: Verdict) -> str:
    complaint = COMPLAINTS[verdict.complaint]
    return (
        f"{verdict.result.upper():<18}{verdict.check}: {verdict.why or verdict.evidence}\n"
        f"{'':<18}({complaint.words}: {', '.join(complaint.issues)})"
    )


def _document(url: str, model: str, seed: int, verdicts: Sequence[Verdict]) -> dict[str, object]:
    told = [
        {**msgspec.to_builtins(each), **msgspec.to_builtins(COMPLAINTS[each.complaint])}
        for each in verdicts
    ]
    return {"url": url, "model": model, "seed": seed, "verdicts": told}


COMMANDS = (
    Command(
        words="conformance", settings=Conformance, run=run, takes_file=True,
        examples="mooncake conformance\n"
        "mooncake conformance --base-url http://10.0.0.7:8000 --checks aborts,cold-warm --json\n"
        "mooncake conformance --other-url http://127.0.0.1:8001 --processes --stop-s 20\n"
        "mooncake conformance --base-url http://127.0.0.1:8200 --prefill-url "
        "http://127.0.0.1:8100 --processes --prefill-pid 4711 --decode-pid 4712",
        notes="One line a check: PASS, FAIL, or NOT POSSIBLE HERE with what it would take. Exit "
        "code 1: a check\nfails. Without --processes nothing but requests is sent. Prompts are "
        "token ids that no request\nhad before; answers are greedy and compared token by token, "
        "so serve in float32 where logits\nare flat.",
    ),
)  # fmt: skip
