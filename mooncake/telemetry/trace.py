"""The timelines of the latest requests, kept in memory and dumped as JSON.

A listener of lifetime events; bounded in requests and in events a request.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from mooncake.telemetry.events import (
    AnyEvent,
    AnyRequestEvent,
    RequestEvent,
    Tokens,
)


class _Timeline:
    __slots__ = ("events", "last_token_s", "num_tokens")

    def __init__(self) -> None:
        self.events: list[AnyRequestEvent] = []
        self.num_tokens = 0
        self.last_token_s: float | None = None


class TraceLog:
    """Remembers what happened to the last `num_requests` requests, tokens as a count only."""

    def __init__(self, num_requests: int = 256, events_per_request: int = 64) -> None:
        if num_requests < 1 or events_per_request < 1:
            raise ValueError("a trace log keeps at least one event of one request")
        self._num_requests = num_requests
        self._events_per_request = events_per_request
        self._timelines: OrderedDict[str, _Timeline] = OrderedDict()

    def record(self, event: AnyEvent) -> None:
        """Add the event to its request's timeline; events of workers are not kept."""
        if not isinstance(event, RequestEvent):
            return
        timeline = self._timelines.get(event.request_id)
        if timeline is None:
            timeline = self._timelines[event.request_id] = _Timeline()
            while len(self._timelines) > self._num_requests:
                self._timelines.popitem(last=False)
        if isinstance(event, Tokens):
            timeline.num_tokens += event.num_tokens
            timeline.last_token_s = event.at_s
        elif len(timeline.events) < self._events_per_request:
            timeline.events.append(event)

    def request_ids(self) -> list[str]:
        """Return the requests that are remembered, oldest first."""
        return list(self._timelines)

    def dump(self, request_id: str) -> bytes | None:
        """Return one timeline as a JSON object, or None when the request is not remembered."""
        timeline = self._timelines.get(request_id)
        if timeline is None:
            return None
        return msgspec.json.encode(
            {
                "request_id": request_id,
                "num_tokens": timeline.num_tokens,
                "last_token_s": timeline.last_token_s,
                "events": timeline.events,
            }
        )
