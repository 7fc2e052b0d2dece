"""Schema accuracy as Moonshot's K2 Vendor Verifier measures it, on its own request format.

    python -m benchmarks k2vv requests.jsonl --url http://127.0.0.1:8000/v1 [--out results.jsonl]

Each line of the file is a chat request with `messages` and `tools` (other fields are sent as they
are). A finished answer that calls tools counts as right when every call names a declared tool and
its arguments are valid against that tool's schema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mooncake.bench.tool_calls import CALLED, fault_of_calls

TIMEOUT_S = 3600.0
NO_ANSWER = "no answer"


@dataclass
class Tally:
    """What came of all requests."""

    finished: Counter[str] = field(default_factory=Counter)
    """Answers by why they finished; `NO_ANSWER` where there is none."""
    faults: Counter[str] = field(default_factory=Counter)
    """Answers with wrong calls, by what is wrong with the first."""

    @property
    def schema_accuracy(self) -> float | None:
        """The share of answers with calls in which every call is right. None: no answer calls."""
        called = self.finished[CALLED]
        return 1 - self.faults.total() / called if called else None

    def add(self, request: dict[str, Any], reply: dict[str, Any] | None) -> str | None:
        """Count one answer and return what is wrong with its calls, None = nothing."""
        none: dict[str, Any] = {"finish_reason": NO_ANSWER}
        choice = none if reply is None else reply["choices"][0]
        self.finished[choice["finish_reason"]] += 1
        if choice["finish_reason"] != CALLED:
            return None
        calls = choice["message"].get("tool_calls") or []
        fault = fault_of_calls(request.get("tools") or [], calls)
        if fault is not None:
            self.faults[fault.split(":")[0]] += 1
        return fault


async def ask(
    client: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the reply to one request, None when there is none."""
    async with gate:
        try:
            response = await client.post("chat/completions", json=body)
        except httpx.HTTPError:
            return None
    if response.status_code != 200:
        return None
    reply: dict[str, Any] = response.json()
    return reply


async def measure(
    requests: list[dict[str, Any]], client: httpx.AsyncClient, concurrency: int
) -> tuple[Tally, list[dict[str, Any]]]:
    """Send all requests and return the tally and one line of findings for each."""
    gate = asyncio.Semaphore(concurrency)
    replies = await asyncio.gather(*(ask(client, gate, body) for body in requests))
    tally = Tally()
    lines = [
        {"fault": tally.add(request, reply), "reply": reply}
        for request, reply in zip(requests, replies, strict=True)
    ]
    return tally, lines


def read_requests(path: Path, model: str | None, max_tokens: int | None) -> list[dict[str, Any]]:
    """Read the requests, each with `model` and `max_tokens` where those are given."""
    requests = []
    for text in path.read_text(encoding="utf-8").splitlines():
        if not text.strip():
            continue
        body = {**json.loads(text), "stream": False}
        body.pop("model" if model is None else "", None)
        body |= {} if model is None else {"model": model}
        body |= {} if max_tokens is None else {"max_tokens": max_tokens}
        requests.append(body)
    return requests


async def run(options: argparse.Namespace) -> int:
    """Measure, print the tally as JSON, return 1 when a call was wrong."""
    requests = read_requests(options.requests, options.model, options.max_tokens)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with httpx.AsyncClient(
        base_url=options.url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT_S
    ) as client:
        tally, lines = await measure(requests, client, options.concurrency)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(json.dumps({**vars(tally), "schema_accuracy": tally.schema_accuracy}, indent=2))
    return 1 if tally.faults else 0


def main(argv: Sequence[str]) -> int:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks k2vv", description=__doc__)
    parser.add_argument("requests", type=Path, help="JSON lines, one chat request each")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="sent instead of the file's own model name")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--out", type=Path, help="one line of findings for each request")
    return asyncio.run(run(parser.parse_args(argv)))
