"""What a worker did for one traced request, until it is told: plain state of a job, by the worker's
own clock. A request that is not traced has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.base.work_span import Fact, WorkEvent, WorkSpan
from mooncake.engine.sequence import Sequence
from mooncake.instance.push import Destination
from mooncake.instance.reuse import PrefixReuse

MAX_CHUNKS = 128
"""Chunks of a prompt that are told one by one; as many as an OpenTelemetry span has events."""


class JobTrace:
    """Collects spans with their times; `take` returns them as they travel."""

    def __init__(self, worker_id: str, now: float) -> None:
        """The job begins `now`."""
        self._worker_id = worker_id
        self.waits_since_s = now
        """When the wait, or the work, began that is shown next."""
        self._spans: list[tuple[float, WorkSpan]] = []
        """(what its times are counted back from, the span)"""
        self._chunks: list[tuple[float, dict[str, Fact]]] = []

    def add(
        self,
        name: str,
        begun_s: float,
        ended_s: float,
        facts: dict[str, Fact],
        events: Iterable[tuple[float, str, dict[str, Fact]]] = (),
    ) -> None:
        """Add a span of this worker."""
        known = {fact: value for fact, value in facts.items() if value != ""}
        span = WorkSpan(
            name,
            0.0,
            ended_s - begun_s,
            {"mooncake.worker": self._worker_id, **known},
            [WorkEvent(what, ended_s - at_s, figures) for at_s, what, figures in events],
        )
        self._spans.append((ended_s, span))

    def waited(self, name: str, now: float) -> None:
        """End a wait, which the span `name` shows; what comes next begins now."""
        self.add(name, self.waits_since_s, now, {})
        self.waits_since_s = now

    def gathered(self, reuse: PrefixReuse | None, now: float) -> None:
        """End the gathering of a prefix; without a fetch there is nothing to show."""
        if reuse is not None and reuse.sources_asked:
            facts: dict[str, Fact] = {
                "mooncake.blocks": reuse.num_fetched,
                "mooncake.bytes": reuse.num_bytes,
                "mooncake.path": reuse.protocol,
                "mooncake.from": ",".join(reuse.sources_asked),
            }
            self.add("fetch", self.waits_since_s, now, facts)
        self.waits_since_s = now

    def chunk(self, start: int, num_tokens: int, now: float) -> None:
        """Note that a step has computed so many tokens of the prompt, from `start` on."""
        if len(self._chunks) < MAX_CHUNKS:
            self._chunks.append((now, {"mooncake.start": start, "mooncake.tokens": num_tokens}))

    def computed(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """End the computation of a prompt's `num_tokens`, which began when the engine first had
        room for it.
        """
        begun_s = now if sequence.started_s is None else sequence.started_s
        self.waited("queue", begun_s)
        facts: dict[str, Fact] = {
            "mooncake.tokens": num_tokens - sequence.num_cached_tokens,
            "mooncake.cached_tokens": sequence.num_cached_tokens,
        }
        chunks = [(at_s, "chunk", figures) for at_s, figures in self._chunks]
        self.add("prefill", begun_s, now, facts, chunks)
        self.waits_since_s = now

    def pushed(self, destination: Destination, now: float) -> None:
        """End a push to decode; where decode had all blocks there is nothing to show."""
        if destination.begun_s is not None:
            facts: dict[str, Fact] = {
                "mooncake.blocks": len(destination.wanted),
                "mooncake.bytes": destination.num_bytes,
                "mooncake.path": destination.protocol,
            }
            self.add("transfer", destination.begun_s, now, facts)

    def decoded(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """End the generation of `num_tokens` tokens."""
        facts: dict[str, Fact] = {
            "mooncake.tokens": num_tokens, "mooncake.preemptions": sequence.num_preemptions,
        }  # fmt: skip
        self.add("decode", self.waits_since_s, now, facts)

    def pass_on(self, spans: Iterable[WorkSpan], now: float) -> None:
        """Take spans of another worker, which have come now."""
        self._spans += [(now, span) for span in spans]

    def take(self, now: float) -> list[WorkSpan]:
        """Return the spans since the last call, for a message that is sent now."""
        spans, self._spans = self._spans, []
        return [_counted_back(span, now - at_s) for at_s, span in spans]


def _counted_back(span: WorkSpan, later_s: float) -> WorkSpan:
    events = [WorkEvent(each.name, each.ago_s + later_s, each.facts) for each in span.events]
    return WorkSpan(span.name, span.ago_s + later_s, span.seconds, span.facts, events)
