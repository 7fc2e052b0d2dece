"""Collects what a worker did for one traced request, until it is reported: plain state of a job, by
the worker's own clock. A request that is not traced has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.base.work_span import Fact, WorkEvent, WorkSpan
from mooncake.engine.sequence import Sequence
from mooncake.instance.push import Destination
from mooncake.instance.reuse import PrefixReuse

MAX_CHUNKS = 128
"""Chunks of a prompt that are reported one by one; as many as an OpenTelemetry span has events."""


class JobTrace:
    """Collects spans; `take` returns those that have not been reported."""

    def __init__(self, worker_id: str, now: float) -> None:
        """Begin the job at `now`."""
        self._worker_id = worker_id
        self.since_s = now
        """When the wait or work began that is shown next."""
        self._spans: list[WorkSpan] = []
        self._chunks: list[WorkEvent] = []

    def waited(self, name: str, now: float) -> None:
        """End a wait, which the span `name` shows. The next work begins now."""
        self._add(name, self.since_s, now, {})
        self.since_s = now

    def gathered(self, reuse: PrefixReuse | None, now: float) -> None:
        """End the gathering of a prefix. Without a fetch there is nothing to show."""
        if reuse is not None and reuse.sources_asked:
            facts: dict[str, Fact] = {
                "mooncake.blocks": reuse.num_fetched,
                "mooncake.bytes": reuse.num_bytes,
                "mooncake.path": reuse.protocol,
                "mooncake.from": ",".join(reuse.sources_asked),
            }
            self._add("fetch", self.since_s, now, facts)
        self.since_s = now

    def chunk(self, start: int, num_tokens: int, now: float) -> None:
        """Note that a step has computed this many tokens of the prompt, from `start` on."""
        if len(self._chunks) < MAX_CHUNKS:
            facts: dict[str, Fact] = {"mooncake.start": start, "mooncake.tokens": num_tokens}
            self._chunks.append(WorkEvent("chunk", now, facts))

    def computed(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """End the computation of a prompt's `num_tokens`. It began when the engine first had room
        for it.
        """
        begun_s = now if sequence.started_s is None else sequence.started_s
        self.waited("queue", begun_s)
        facts: dict[str, Fact] = {
            "mooncake.tokens": num_tokens - sequence.num_cached_tokens,
            "mooncake.cached_tokens": sequence.num_cached_tokens,
        }
        self._add("prefill", begun_s, now, facts, self._chunks)
        self.since_s = now

    def pushed(self, destination: Destination, now: float) -> None:
        """End a push to decode. If decode had all blocks, there is nothing to show."""
        if destination.begun_s is not None:
            facts: dict[str, Fact] = {
                "mooncake.blocks": len(destination.wanted),
                "mooncake.bytes": destination.num_bytes,
                "mooncake.path": destination.protocol,
            }
            self._add("transfer", destination.begun_s, now, facts)

    def decoded(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """End the generation of `num_tokens` tokens."""
        facts: dict[str, Fact] = {
            "mooncake.tokens": num_tokens,
            "mooncake.preemptions": sequence.num_preemptions,
        }
        self._add("decode", self.since_s, now, facts)

    def pass_on(self, spans: Iterable[WorkSpan]) -> None:
        """Add spans of another worker."""
        self._spans += spans

    def take(self) -> tuple[WorkSpan, ...]:
        """Return the spans since the last call."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        facts: dict[str, Fact],
        events: Iterable[WorkEvent] = (),
    ) -> None:
        known = {fact: value for fact, value in facts.items() if value != ""}
        self._spans.append(WorkSpan(name, self._worker_id, start_s, end_s, known, list(events)))


def told(trace: JobTrace | None) -> tuple[WorkSpan, ...]:
    """Return what a job has to report now; nothing if nobody wants it."""
    return trace.take() if trace is not None else ()
