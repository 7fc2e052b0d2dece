"""`mooncake bench serve`: sends a dataset to an OpenAI endpoint and measures the answers.

Owns the run: concurrency, the clock, the progress bar. `metrics` computes the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from mooncake.api.http.client import HttpClient, RequestFailed
from mooncake.base import ConfigError, MooncakeError, Unauthorized, Unavailable, Unreachable
from mooncake.bench.arrivals import Run
from mooncake.bench.endpoint import Output, Target, ask
from mooncake.bench.metrics import Metrics, metrics_of
from mooncake.bench.samples import Sample
from mooncake.bench.server_counters import parse_counts, parse_rows

REFRESHES_PER_S = 2
"""How often per second the progress bar is drawn: seldom, because the server may run on the same
machine.
"""
READY_POLL_S = 1.0
MAX_SHOWN_ERRORS = 10


async def first_model(client: HttpClient, headers: dict[str, str]) -> str:
    """Return the name of the first model that the server has.

    Raises:
        Unreachable: the server does not answer.
        Unauthorized: it refuses the key.
        Unavailable: it lists no model.
    """
    kind: type[MooncakeError] = Unavailable
    body = bytearray()
    try:
        answer = await client.request(
            "GET", "/v1/models", headers, b"", lambda data, _: body.extend(data)
        )
        if answer.status == 200:
            return str(msgspec.json.decode(bytes(body))["data"][0]["id"])
        problem = f"{answer.status} {answer.reason}"
        if answer.status in (401, 403):
            kind = Unauthorized
    except RequestFailed as error:
        problem, kind = str(error), Unreachable
    except (msgspec.MsgspecError, LookupError, TypeError):
        problem = "there is none in its answer"
    raise kind(f"the server's models are not known ({problem}); name one with `model`")


async def benchmark(
    client: HttpClient, target: Target, samples: Sequence[Sample], run: Run
) -> tuple[Metrics, list[Output]]:
    """Send `samples` and return figures and answers in the samples' order.

    Raises:
        ConfigError: the samples do not suit the backend.
        Unreachable: the server was not ready in time.
    """
    warmups, samples = samples[: run.num_warmups], samples[run.num_warmups :]
    if not samples:
        raise ConfigError("num-prompts: no request is left to measure; give at least 1")
    if run.ready_timeout_s > 0:
        await _ready(client, target, (warmups or samples)[0], run.ready_timeout_s)
    gate = asyncio.Semaphore(run.max_concurrency or len(samples))
    if warmups:
        await asyncio.gather(
            *(_gated(gate, client, target, each, number) for number, each in enumerate(warmups))
        )
    times_s = _times_s(samples, run)
    before = await server_metrics(client, target.headers)
    with _progress(len(samples), run.progress) as advance:
        start_s = time.perf_counter()
        tasks = []
        for number, (sample, at_s) in enumerate(zip(samples, times_s, strict=True)):
            delay_s = start_s + at_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            task = asyncio.create_task(_gated(gate, client, target, sample, number))
            task.add_done_callback(advance)
            tasks.append(task)
        outputs = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - start_s
    after = await server_metrics(client, target.headers)
    metrics = dataclasses.replace(
        metrics_of(outputs, duration_s, run.percentiles, run.goodput_ms),
        drafts=parse_counts(after).since(parse_counts(before)),
        expert_balance_before=parse_rows(before).balance,
        expert_balance=parse_rows(after).since(parse_rows(before)).balance,
    )
    return metrics, outputs


async def server_metrics(client: HttpClient, headers: dict[str, str]) -> str:
    """Return the server's counters so far, as text in Prometheus' format; "" if it gives none."""
    body = bytearray()
    try:
        answer = await client.request(
            "GET", "/metrics", headers, b"", lambda data, _: body.extend(data)
        )
    except RequestFailed:
        return ""
    return body.decode(errors="replace") if answer.status == 200 else ""


def _times_s(samples: Sequence[Sample], run: Run) -> list[float]:
    if run.self_timed:
        return [sample.at_s or 0.0 for sample in samples]
    return run.arrivals.times_s(len(samples), run.seed)


async def _gated(
    gate: asyncio.Semaphore, client: HttpClient, target: Target, sample: Sample, number: int
) -> Output:
    come_s = time.perf_counter()
    async with gate:
        output = await ask(client, target, sample, number)
    output.queued_s = output.start_s - come_s
    return output


async def _ready(client: HttpClient, target: Target, sample: Sample, timeout_s: float) -> None:
    """Poll the server until it answers."""
    end_s = time.perf_counter() + timeout_s
    while True:
        output = await ask(client, target, sample, 0)
        if output.success:
            return
        if time.perf_counter() > end_s:
            raise Unreachable(f"the server gave no answer within {timeout_s:.0f} s: {output.error}")
        await asyncio.sleep(READY_POLL_S)


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[object], None]]:
    if not wanted:
        yield lambda _: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, refresh_per_second=REFRESHES_PER_S) as progress:
        task = progress.add_task("", total=total)
        yield lambda _: progress.advance(task)


def shown_errors(outputs: Sequence[Output]) -> str:
    """Return the first errors as lines to print; empty when all requests succeeded."""
    errors = [output.error for output in outputs if not output.success]
    lines = [f"Error {number}: {error}" for number, error in enumerate(errors[:MAX_SHOWN_ERRORS])]
    if len(errors) > MAX_SHOWN_ERRORS:
        lines.append(f"… and {len(errors) - MAX_SHOWN_ERRORS} more")
    return "\n".join(lines)


def file_name(label: str, model: str, rate: float, max_concurrency: int | None, date: str) -> str:
    """Return the default name of a result file."""
    concurrency = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
    base = model.rstrip("/").rsplit("/", 1)[-1]
    return f"{label}-{rate_word(rate)}qps{concurrency}-{base}-{date}.json"


def rate_word(rate: float) -> float | str:
    """Return the rate as result files write it, because JSON has no infinity."""
    return "inf" if rate == math.inf else rate


def rendered(document: dict[str, Any], old: str | None) -> str:
    """Return the text of a result file. With `old`, that is the old file's text with this run
    appended.

    Raises:
        ConfigError: `old` is not a result file.
    """
    if old is None:
        return json.dumps(document)
    try:
        before = json.loads(old) if old.strip() else []
    except ValueError as error:
        raise ConfigError(
            f"append-result: the file is not JSON ({error}); name another file"
        ) from error
    return json.dumps([*(before if isinstance(before, list) else [before]), document])
