"""Traces as workloads: JSONL of timestamps, lengths and 512-token block ids, turned into requests.

Pure values, parsed from text that the caller has read. A prompt is built when its request is due,
so only requests in flight take memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from mooncake.base import ConfigError, GenerateRequest, Priority, SamplingParams, pack_tokens

TRACE_BLOCK_TOKENS = 512
"""The number of tokens that one id of `hash_ids` stands for (Mooncake's published traces)."""
STOP_TOKEN = 0
"""The token that a simulated worker samples where the recorded output ended. Prompts never
hold it.
"""
MAX_TOKENS = 8192
"""The `max_tokens` that every client asks for. Only the trace knows how long an output *will* be,
and the cluster must not know.
"""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. Equal leading ids mean an equal prefix."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""

    @property
    def num_blocks(self) -> int:
        """The number of 512-token blocks of the prompt; the last may be partial."""
        return len(self.hash_ids)


def parse_trace(lines: Iterable[str | bytes], name: str) -> list[TraceLine]:
    """Return the requests of a trace in order of time. `name` is for error messages.

    Raises:
        ConfigError: a line is malformed, or its lengths contradict its ids.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    requests: list[TraceLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        wanted = -(-request.input_length // TRACE_BLOCK_TOKENS)
        if request.input_length < 1 or request.num_blocks != wanted:
            raise ConfigError(
                f"{name}, line {number}: {request.input_length} tokens need {wanted} hash_ids of "
                f"{TRACE_BLOCK_TOKENS} tokens each, there are {request.num_blocks}"
            )
        if min(request.hash_ids) < 0 or not math.isfinite(request.timestamp):
            raise ConfigError(f"{name}, line {number}: ids and times must be numbers from 0 on")
        requests.append(request)
    if not requests:
        raise ConfigError(f"{name}: there is no request in it; give a trace with at least one line")
    return sorted(requests, key=lambda request: request.timestamp)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One future request: its arrival time and its trace line."""

    index: int
    at_s: float
    line: TraceLine
    num_output_tokens: int

    @property
    def request_id(self) -> str:
        return f"r{self.index}"

    def request(self, max_model_len: int) -> GenerateRequest:
        """Build the request with its prompt.

        Its seed identifies the request, so that a simulated worker knows its output length.
        """
        room = max_model_len - self.line.input_length
        return GenerateRequest(
            request_id=self.request_id,
            prompt=pack_tokens(prompt_tokens(self.line)),
            sampling=SamplingParams(
                max_tokens=max(1, min(room, max(MAX_TOKENS, self.num_output_tokens))),
                seed=self.index,
                stop_token_ids=frozenset({STOP_TOKEN}),
            ),
            tenant=self.line.tenant,
            priority=self.line.priority,
        )


def prompt_tokens(line: TraceLine) -> list[int]:
    """Return a prompt whose blocks are equal exactly where the trace's ids are. Each token of a
    block is the block's id plus one, because no prompt holds the stop token.
    """
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        tokens += [hash_id + 1] * TRACE_BLOCK_TOKENS
    del tokens[line.input_length :]
    return tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A trace prepared for replay."""

    arrivals: Sequence[Arrival]

    @classmethod
    def replay(
        cls,
        trace: Sequence[TraceLine],
        *,
        speed: float = 1.0,
        limit: int | None = None,
        max_output_tokens: int | None = None,
    ) -> Workload:
        """Return the first `limit` requests, `speed` times as fast as recorded, outputs cut."""
        chosen = trace[:limit]
        first_ms = chosen[0].timestamp
        return cls(
            arrivals=[
                Arrival(
                    index=index,
                    at_s=(line.timestamp - first_ms) / 1e3 / speed,
                    line=line,
                    num_output_tokens=max(1, min(line.output_length, max_output_tokens or 1 << 30)),
                )
                for index, line in enumerate(chosen)
            ]
        )

    @property
    def duration_s(self) -> float:
        """The time between the first and the last arrival."""
        return self.arrivals[-1].at_s

    @property
    def output_lengths(self) -> list[int]:
        """The output length in tokens of each request, by index."""
        return [arrival.num_output_tokens for arrival in self.arrivals]

    @property
    def max_model_len(self) -> int:
        """The context that no request of this workload exceeds, in whole blocks."""
        longest = max(a.line.input_length + a.num_output_tokens for a in self.arrivals)
        return -(-(longest + 1) // TRACE_BLOCK_TOKENS) * TRACE_BLOCK_TOKENS


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that describe a trace."""

    num_requests: int
    duration_s: float
    requests_per_s: float
    input_tokens: dict[str, float]
    """mean, p50, p90, p99, max."""
    output_tokens: dict[str, float]
    num_block_refs: int
    num_unique_blocks: int
    used_once_ratio: float
    """The share of unique blocks that are used once."""
    max_hit_rate: float
    """The share of blocks in leading runs seen before: the hits of an unbounded cache."""


def describe(trace: Sequence[TraceLine]) -> TraceFacts:
    uses = Counter(hash_id for line in trace for hash_id in line.hash_ids)
    num_refs = sum(uses.values())
    duration_s = (trace[-1].timestamp - trace[0].timestamp) / 1e3
    seen: set[int] = set()
    num_hits = 0
    for line in trace:
        for hash_id in line.hash_ids:
            if hash_id not in seen:
                break
            num_hits += 1
        seen.update(line.hash_ids)
    return TraceFacts(
        num_requests=len(trace),
        duration_s=duration_s,
        requests_per_s=len(trace) / duration_s if duration_s else 0.0,
        input_tokens=_spread([line.input_length for line in trace]),
        output_tokens=_spread([line.output_length for line in trace]),
        num_block_refs=num_refs,
        num_unique_blocks=len(uses),
        used_once_ratio=sum(count == 1 for count in uses.values()) / len(uses),
        max_hit_rate=num_hits / num_refs,
    )


def _spread(values: list[int]) -> dict[str, float]:
    ordered = sorted(values)
    at = {name: ordered[int(q * (len(ordered) - 1))] for name, q in _QUANTILES.items()}
    return {"mean": sum(ordered) / len(ordered), **at}


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
