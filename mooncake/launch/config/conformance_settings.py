"""Settings of `mooncake conformance`."""

from __future__ import annotations

import dataclasses

from mooncake.bench.conformance.complaints import CHECKS
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
        "also kill, stop and replace processes of the server, which must run on this machine",
        switch=True)
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
    json: bool = setting(False, truth, RESULT, "", "print one JSON document instead of lines",
        switch=True)
    # fmt: on
