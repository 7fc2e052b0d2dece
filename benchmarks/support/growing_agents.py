"""Agents at servers of vLLM. Each turn repeats all that was said before and adds what a tool
returned.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence

import msgspec

from benchmarks.support.vllm_servers import VOCAB
from mooncake.api.http.client import HttpClient
from mooncake.api.http.client_wire import EventSplitter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents:
    """How many there are and what they say. Lengths are in tokens."""

    agents: int = 7
    turns: int = 6
    system_len: int = 512
    first_len: int = 700
    added_len: int = 200
    output_len: int = 32
    think_s: float = 4.0
    """Mean time of a tool."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Give a flag to each field, with its value as the default."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), default=value)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Agents:
        """Return those of the flags."""
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})


class Found(msgspec.Struct, kw_only=True):
    """What agents saw."""

    first_s: list[float] = msgspec.field(default_factory=list)
    """TTFT of the first turns."""
    next_s: list[float] = msgspec.field(default_factory=list)
    """TTFT of the others."""
    num_prompt: int = 0
    num_cached: int = 0
    took_s: float = 0.0

    @property
    def share(self) -> float:
        """Part of the prompts' tokens that came from a cache."""
        return self.num_cached / self.num_prompt

    def add(self, other: Found) -> None:
        """Count in what others saw."""
        self.first_s += other.first_s
        self.next_s += other.next_s
        self.num_prompt += other.num_prompt
        self.num_cached += other.num_cached
        self.took_s += other.took_s


def times(ttft_s: Sequence[float]) -> str:
    """Return the median and the 90th percentile in milliseconds, as two cells."""
    late_s = statistics.quantiles(ttft_s, n=10)[-1]
    return f"{1000 * statistics.median(ttft_s):,.0f} | {1000 * late_s:,.0f}"


async def converse(urls: Sequence[str], load: Agents, seed: int, salt: str = "") -> Found:
    """Run all agents at once and return what they saw. Of several servers, each turn goes to
    another than the turn before. Another salt has the same pauses and other words.
    """
    found = Found()
    system = random.Random(f"{seed} {salt}").choices(range(1, VOCAB), k=load.system_len)
    clients = [HttpClient(url) for url in urls]

    async def agent(number: int) -> None:
        words, pauses = random.Random(f"{seed} {number} {salt}"), random.Random(f"{seed} {number}")
        history = [*system, *words.choices(range(1, VOCAB), k=load.first_len)]
        await asyncio.sleep(number * load.think_s / load.agents)
        for turn in range(load.turns):
            client = clients[(number + turn) % len(clients)]
            ttft_s = found.next_s if turn else found.first_s
            history += await _turn(client, history, load.output_len, found, ttft_s)
            history += words.choices(range(1, VOCAB), k=load.added_len)
            await asyncio.sleep(pauses.uniform(0.5, 1.5) * load.think_s)

    begun_s = time.perf_counter()
    try:
        await asyncio.gather(*(agent(number) for number in range(load.agents)))
    finally:
        for client in clients:
            client.close()
    found.took_s = time.perf_counter() - begun_s
    return found


async def _turn(
    client: HttpClient, history: list[int], num_tokens: int, found: Found, ttft_s: list[float]
) -> list[int]:
    """Ask for one turn and return the tokens of its answer."""
    body = {
        "model": "bench", "prompt": history, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    splitter, events, first = EventSplitter(), list[bytes](), list[float]()

    def take(data: bytes, at_s: float) -> None:
        events.extend(splitter.feed(data))
        if events and not first:
            first.append(at_s)

    begun_s = time.perf_counter()
    answer = await client.request(
        "POST", "/v1/completions", {"Content-Type": "application/json"},
        json.dumps(body).encode(), take,
    )  # fmt: skip
    if answer.status != 200 or not first:
        raise RuntimeError(f"status {answer.status}: {events[:1]}")
    ttft_s.append(first[0] - begun_s)
    told = [json.loads(event) for event in events if event != b"[DONE]"]
    usage = told[-1]["usage"]
    found.num_prompt += usage["prompt_tokens"]
    found.num_cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return [token for each in told for choice in each["choices"] for token in choice["token_ids"]]
