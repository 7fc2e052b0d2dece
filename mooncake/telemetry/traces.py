"""Traces: the finished span tree of an API call, made from lifetime events and from what workers
report. A tree goes to an exporter, such as `otlp.py`, which sends it away.

The tracer owns the traced calls that have not ended. Times are on the gateway's clock;
`WorkerClocks` converts those of workers to it. A trace holds no text of a prompt or an answer, and
nothing of a request that is not traced.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mooncake.base import FinishReason
from mooncake.base.request import Fact, WorkSpan
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    FirstToken,
    Placed,
    Refused,
    RequestEvent,
    Requeued,
    Worked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)

MAX_REPORTS = 60
"""How many reports are kept: about a minute's. Over a longer time, clocks drift apart by more than
a message takes.
"""


class WorkerClocks:
    """The last reports of each worker."""

    def __init__(self) -> None:
        self._ahead_s: dict[str, deque[float]] = {}
        """Worker -> by how much the gateway's clock was ahead of each report's."""

    def reported(self, worker_id: str, clock_s: float, now: float) -> None:
        """Take a report that has just arrived."""
        known = self._ahead_s.setdefault(worker_id, deque(maxlen=MAX_REPORTS))
        known.append(now - clock_s)

    def forget(self, worker_id: str) -> None:
        """Drop the reports of a worker that has left or has started again."""
        self._ahead_s.pop(worker_id, None)

    def ahead_s(self, worker_id: str) -> float | None:
        """Return what to add to a worker's times to get the gateway's, or None if it has not
        reported yet.
        """
        known = self._ahead_s.get(worker_id)
        return min(known) if known else None


MAX_SEQUENCES = 16
"""Calls with more sequences than this show only what the API server did."""
MAX_WORK_SPANS = 64
"""The most spans of workers that are kept for one placement."""
MAX_PLACEMENTS = 16
"""The most placements that are shown of one request. A request may be placed many times while
others go first.
"""
MAX_STATE_CHARS = 512
"""A longer `tracestate` is dropped, as W3C allows."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_TRACESTATE = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{1,256}"
    r"(?:[ \t]*,[ \t]*[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{1,256}){0,31}"
)

Attributes = dict[str, Fact | list[str]]


@dataclass(frozen=True, slots=True)
class Caller:
    """The span of the client that a call belongs to."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


@dataclass(slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A piece of work and its parts."""

    name: str
    start_s: float
    end_s: float = 0.0
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    children: list[Span] = field(default_factory=list)
    error: str | None = None
    """Why it failed."""

    def child(self, name: str, start_s: float, end_s: float = 0.0, **attributes: Fact) -> Span:
        """Add a part. The names of its attributes get the prefix `mooncake.`."""
        span = Span(name, start_s, end_s)
        span.attributes.update({f"mooncake.{key}": value for key, value in attributes.items()})
        self.children.append(span)
        return span


Export = Callable[[Span, Caller | None], None]
"""Takes a finished tree and its caller. It must be quick and never raise."""


def read_caller(traceparent: str, tracestate: str = "") -> Caller | None:
    """Return the span that W3C's headers name, or None if there is none, or it is not valid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    is_state = len(tracestate) <= MAX_STATE_CHARS and _TRACESTATE.fullmatch(tracestate.strip())
    state = tracestate.strip() if is_state else ""
    return Caller(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED), state)


class SequenceTrace:
    """One sequence of a call, as the gateway sees it: fills `span` from its events."""

    def __init__(self, span: Span, clocks: WorkerClocks) -> None:
        self.span = span
        self._clocks = clocks
        self.first_token_s: float | None = None
        self.status = 200
        self.seconds: dict[str, float] = {}
        """The latencies under vLLM's names."""
        self._waits_since_s: float | None = None
        self._placement: Span | None = None
        self._attempt = 0
        self._num_placed = 0
        self._num_told = 0

    def take(self, event: RequestEvent) -> bool:
        """Take an event; return whether it was the last."""
        span, now = self.span, event.at_s
        match event:
            case Accepted():
                span.start_s = self._waits_since_s = now
            case Placed():
                self._on_placed(event)
            case Worked():
                if self._placement is not None and event.attempt == self._attempt:
                    self._on_worked(self._placement, event.spans, now)
            case FirstToken():
                self.first_token_s = now
                span.events.append(SpanEvent("first_token", now))
            case Requeued():
                self._end_placement(now, event.reason)
                self._waits_since_s = now
            case Refused():
                span.start_s = now
                self._fail(event.status, f"it was refused: {event.reason}")
                self.end(now)
                return True
            case Finished():
                self._on_finished(event)
                return True
            case _:
                pass
        return False

    def end(self, now: float) -> None:
        """End the spans that are open."""
        if self._waits_since_s is not None:
            self._end_wait(now)
        self._end_placement(now)
        self.span.end_s = now

    def _on_placed(self, event: Placed) -> None:
        self._end_wait(event.at_s)
        self._attempt, self._num_told = event.attempt, 0
        self._num_placed += 1
        if self._num_placed > MAX_PLACEMENTS:
            self.span.attributes["mooncake.placements"] = self._num_placed
            return
        self._placement = self.span.child(
            "placement",
            event.at_s,
            attempt=self._num_placed,
            decode_worker=event.decode,
            predicted_ttft_s=event.predicted_ttft_s,
            predicted_tbt_s=event.predicted_tbt_s,
            predicted_cached_tokens=event.num_cached_tokens,
        )
        if event.prefill is not None:
            self._placement.attributes["mooncake.prefill_worker"] = event.prefill

    def _on_worked(self, placement: Span, spans: Sequence[WorkSpan], now: float) -> None:
        """Add the spans of a worker. They lie between its task and now."""
        for each in spans[: MAX_WORK_SPANS - self._num_told]:
            self._num_told += 1
            ahead_s = self._clocks.ahead_s(each.worker_id)
            if ahead_s is None:  # a worker that has just joined: assume no delay
                ahead_s = now - max(it.end_s for it in spans if it.worker_id == each.worker_id)
            here = partial(_within, placement.start_s, now, ahead_s)
            span = placement.child(
                each.name, here(each.start_s), here(each.end_s), worker=each.worker_id
            )
            span.attributes.update(each.facts)
            span.events += [
                SpanEvent(told.name, here(told.at_s), dict(told.facts)) for told in each.events
            ]
            if each.name in _TIMED:
                self._add_seconds(_TIMED[each.name], each.end_s - each.start_s)

    def _on_finished(self, event: Finished) -> None:
        attributes = self.span.attributes
        attributes["mooncake.end"] = event.reason.value
        attributes["mooncake.input_tokens"] = event.num_prompt_tokens
        attributes["mooncake.output_tokens"] = event.num_output_tokens
        attributes["mooncake.cached_tokens"] = event.num_cached_tokens
        if event.reason is FinishReason.ERROR:
            self._fail(event.status, "it failed")
        self.end(event.at_s)

    def _fail(self, status: int, error: str) -> None:
        self.status, self.span.error = status, error
        self.span.attributes["error.type"] = str(status)

    def _end_wait(self, now: float) -> None:
        since_s = now if self._waits_since_s is None else self._waits_since_s
        self._waits_since_s = None
        if self._num_placed < MAX_PLACEMENTS:
            self.span.child("queue", since_s, now)
        self._add_seconds("time_in_queue", now - since_s)

    def _end_placement(self, now: float, error: str | None = None) -> None:
        if self._placement is not None:
            self._placement.end_s, self._placement.error = now, error
            self._placement = None

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _within(first_s: float, last_s: float, ahead_s: float, there_s: float) -> float:
    return min(last_s, max(first_s, there_s + ahead_s))


_TIMED = {"prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}


class Trace:
    """The tree so far of a traced API call. The `Tracer` makes and ends it."""

    def __init__(
        self,
        caller: Caller | None,
        root: Span,
        following: dict[str, SequenceTrace],
        clocks: WorkerClocks,
    ) -> None:
        self.caller = caller
        self.root = root
        self._following = following
        self._clocks = clocks
        self.sequences: dict[str, SequenceTrace] = {}
        self.sent_s: float | None = None
        """When the first byte of the answer went to the client."""

    def follow(self, request_ids: Iterable[str]) -> bool:
        """Show these requests as parts of the call, unless they are too many. Return whether they
        are shown.
        """
        ids = list(request_ids)
        if len(ids) > MAX_SEQUENCES:
            return False
        for request_id in ids:
            span = self.root.child("request", self.root.start_s)
            span.attributes["gen_ai.request.id"] = request_id
            sequence = SequenceTrace(span, self._clocks)
            self.sequences[request_id] = self._following[request_id] = sequence
        return True


class Tracer:
    """A recorder of lifetime events that chooses which calls are traced, and makes their trees."""

    def __init__(self, export: Export, ratio: float, draw: Callable[[], float]) -> None:
        """ratio: the share of calls without a `traceparent` that are traced. A call that has one is
        traced if its client says so. draw: returns a random number from 0 up to 1.
        """
        self._export = export
        self._ratio = ratio
        self._draw = draw
        self._following: dict[str, SequenceTrace] = {}
        """The unfinished requests of traced calls."""
        self._clocks = WorkerClocks()

    def begin(self, traceparent: str, tracestate: str, now: float) -> Trace | None:
        """Begin the trace of a call with these headers. Return None if it is not traced."""
        caller = read_caller(traceparent, tracestate) if traceparent else None
        sampled = self._draw() < self._ratio if caller is None else caller.sampled
        if not sampled:
            return None
        return Trace(caller, Span("api", now), self._following, self._clocks)

    def record(self, event: AnyEvent) -> None:
        """Take one event. Events of requests that are not traced are ignored."""
        match event:
            case RequestEvent():
                sequence = self._following.get(event.request_id)
                if sequence is not None and sequence.take(event):
                    del self._following[event.request_id]
            case WorkerReported():
                self._clocks.reported(event.worker_id, event.clock_s, event.at_s)
            case WorkerJoined() | WorkerLeft():
                self._clocks.forget(event.worker_id)
            case _:
                pass

    def end(self, trace: Trace, now: float) -> None:
        """End a call: its answer has been sent, or its client has gone."""
        root = trace.root
        root.end_s = now
        seconds = {"e2e": now - root.start_s}
        firsts: list[float] = []
        for request_id, sequence in trace.sequences.items():
            if self._following.get(request_id) is sequence:
                del self._following[request_id]
                sequence.end(now)
            if sequence.first_token_s is not None:
                firsts.append(sequence.first_token_s)
            if sequence.status >= 500:
                root.error = root.error or sequence.span.error
            for name, length_s in sequence.seconds.items():
                seconds[name] = max(length_s, seconds.get(name, 0.0))
        if firsts:
            seconds["time_to_first_token"] = min(firsts) - root.start_s
        root.attributes.update({f"gen_ai.latency.{name}": each for name, each in seconds.items()})
        if trace.sent_s is not None:
            root.child("delivery", trace.sent_s, now)
        self._export(root, trace.caller)
