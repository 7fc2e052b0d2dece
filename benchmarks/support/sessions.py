"""Loads of an open loop: sessions of turns, each turn longer than the last by what came between.

Pure: a seed gives the same load. A lone request is a session of one turn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import msgspec

from mooncake.bench.arrivals import Arrivals
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine

Draw = Callable[[random.Random, int], list[int]]
"""Returns that many random tokens."""

SHORTER_PROMPT, SHORTER_ANSWER = 16, 8
"""The published trace is for a model and GPUs that are that much larger than this machine."""
SYSTEM_TOKENS = 512
"""Tokens of the prompt with which all agents begin."""
TASK_TOKENS, RESULT_TOKENS, CALL_TOKENS = (128, 384), (64, 256), (16, 48)
NUM_TURNS, TOOL_S = (4, 8), 2.0
CHAT_TOKENS, CHAT_ANSWER = (32, 256), (32, 96)
FLOOD_TOKENS, FLOOD_BURST = (256, 1024), 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Party:
    """Who sends requests: a tenant, in one of its classes."""

    tenant: str
    priority: str
    share: float
    """The share of all requests."""

    @property
    def key(self) -> str:
        """The API key of the tenant."""
        return f"sk-{self.tenant}"


PARTIES = {
    "small": Party(tenant="small", priority="interactive", share=0.25),
    "small, premium": Party(tenant="small", priority="premium", share=0.1),
    "flood": Party(tenant="flood", priority="interactive", share=0.5),
    "flood, batch": Party(tenant="flood", priority="batch", share=0.15),
}
"""Two tenants. One sends chats, the other eight times as many tokens, in bursts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One request: what its prompt adds to the conversation, and how long the answer is."""

    fresh: list[int]
    output_len: int
    pause_s: float = 0.0
    """Seconds between the answer before and this request, in which a tool runs or a person
    types."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Requests that follow one another; the first is sent `at_s` after the load began."""

    at_s: float
    turns: Sequence[Turn]
    party: str = ""
    """One of `PARTIES`; empty: nobody in particular."""
    name: str = ""
    """The `session_id` of its requests; empty: they have none."""


def shorter(lines: Sequence[TraceLine], max_model_len: int) -> list[TraceLine]:
    """Return the requests as short as this machine takes them; those too long even so are left out.

    Their ids then stand for `TRACE_BLOCK_TOKENS / SHORTER_PROMPT` tokens each.
    """
    cut = [
        msgspec.structs.replace(
            line,
            input_length=max(1, line.input_length // SHORTER_PROMPT),
            output_length=max(2, line.output_length // SHORTER_ANSWER),
        )
        for line in lines
    ]
    return [line for line in cut if line.input_length + line.output_length <= max_model_len]


def conversations(
    lines: Sequence[TraceLine], count: int, rate: float, draw: Draw, seed: int, *, recorded: bool
) -> list[Session]:
    """Return `count` requests of a trace made `shorter`, from a place that `seed` chooses, with
    prefixes shared where the trace shares them.

    recorded: at the trace's own times, scaled to `rate` requests a second; else a Poisson process.
    """
    source = random.Random(f"conversations/{seed}")
    begin = source.randrange(max(1, len(lines) - count + 1))
    chosen = lines[begin : begin + count]
    if recorded:
        first, last = chosen[0].timestamp, chosen[-1].timestamp
        scale = len(chosen) / rate / ((last - first) or 1.0)
        times_s = [(line.timestamp - first) * scale for line in chosen]
    else:
        times_s = Arrivals(rate=rate).times_s(len(chosen), seed)
    block = TRACE_BLOCK_TOKENS // SHORTER_PROMPT
    sessions = []
    for line, at_s in zip(chosen, times_s, strict=True):
        tokens: list[int] = []
        for hash_id in line.hash_ids:
            tokens += draw(random.Random(f"{seed}/{hash_id}"), block)
        turn = Turn(fresh=tokens[: line.input_length], output_len=line.output_length)
        sessions.append(Session(at_s=at_s, turns=[turn]))
    return sessions


def agents(count: int, rate: float, draw: Draw, seed: int) -> list[Session]:
    """Return agents with about `count` turns in all, that call a tool after each turn but the last.

    They share a system prompt. Sessions begin as a Poisson process, so many that requests come at
    `rate` a second.
    """
    source = random.Random(f"agents/{seed}")
    system = draw(source, SYSTEM_TOKENS)
    turns: list[list[Turn]] = []
    while sum(map(len, turns)) < count:
        task = system + draw(source, source.randint(*TASK_TOKENS))
        session = [Turn(fresh=task, output_len=source.randint(*CALL_TOKENS))]
        for _ in range(source.randint(*NUM_TURNS) - 1):
            session.append(
                Turn(
                    fresh=draw(source, source.randint(*RESULT_TOKENS)),
                    output_len=source.randint(*CALL_TOKENS),
                    pause_s=source.expovariate(1 / TOOL_S),
                )
            )
        turns.append(session)
    session_rate = rate * len(turns) / sum(map(len, turns))
    times_s = Arrivals(rate=session_rate).times_s(len(turns), seed)
    return [Session(at_s=at_s, turns=each) for at_s, each in zip(times_s, turns, strict=True)]


def chats(count: int, rate: float, draw: Draw, seed: int) -> list[Session]:
    """Return `count` short questions that share nothing, as a Poisson process."""
    source = random.Random(f"chats/{seed}")
    return [
        Session(
            at_s=at_s,
            turns=[
                Turn(
                    fresh=draw(source, source.randint(*CHAT_TOKENS)),
                    output_len=source.randint(*CHAT_ANSWER),
                )
            ],
        )
        for at_s in Arrivals(rate=rate).times_s(count, seed)
    ]


def tenants(count: int, rate: float, draw: Draw, seed: int) -> list[Session]:
    """Return about `count` requests of all `PARTIES`, at `rate` a second together. The small
    tenant's are chats. Those of the one that floods are longer, and come in bursts.
    """
    sessions: list[Session] = []
    for name, party in PARTIES.items():
        source = random.Random(f"tenants/{seed}/{name}")
        burst = FLOOD_BURST if party.tenant == "flood" else 1
        num_bursts = max(1, round(count * party.share / burst))
        times_s = Arrivals(rate=rate * party.share / burst).times_s(
            num_bursts, source.randrange(99)
        )
        lengths = FLOOD_TOKENS if party.tenant == "flood" else CHAT_TOKENS
        for at_s in times_s:
            for _ in range(burst):
                turn = Turn(
                    fresh=draw(source, source.randint(*lengths)),
                    output_len=source.randint(*CHAT_ANSWER),
                )
                sessions.append(Session(at_s=at_s, turns=[turn], party=name))
    return sorted(sessions, key=lambda session: session.at_s)


def keys_file() -> str:
    """Return the content of a file for `--api-keys-file` with a key of each tenant."""
    lines = ["keys:"]
    for tenant in sorted({party.tenant for party in PARTIES.values()}):
        own = [party for party in PARTIES.values() if party.tenant == tenant]
        classes = ", ".join(party.priority for party in own)
        lines.append(f"  - {{name: {tenant}, key: {own[0].key}, priorities: [{classes}]}}")
    return "\n".join(lines) + "\n"
