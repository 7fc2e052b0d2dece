"""The named events in the life of a request and of a worker, each with its time: all latency
metrics and traces are derived from these and from nothing else.

Values only. Whoever has the news (the gateway) makes the event; who listens is wired by `launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from mooncake.base import FinishReason, Role, WorkerLoad


class LifetimeEvent(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"
):
    """Root of all events; `at_s` is on the driver's clock."""

    at_s: float


class RequestEvent(LifetimeEvent, frozen=True, kw_only=True):
    """Something happened to one request."""

    request_id: str


class Accepted(RequestEvent, frozen=True, tag="accepted"):
    """The request holds a permit: exactly one `Finished` follows."""

    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None


class Refused(RequestEvent, frozen=True, tag="refused"):
    """The request was turned away before any work; nothing else is recorded of it."""

    status: int
    reason: str
    """A short name, such as "ttft_limit"."""


class Placed(RequestEvent, frozen=True, tag="placed"):
    """Workers were chosen and told. `attempt` above 1: it goes on after a loss."""

    attempt: int
    prefill: str | None
    decode: str
    predicted_ttft_s: float
    """From now on, as the cost models saw it."""
    predicted_tbt_s: float
    num_cached_tokens: int
    """Prompt tokens the Conductor expects to be reused."""
    num_fetch_blocks: int = 0


class FirstToken(RequestEvent, frozen=True, tag="first_token"):
    """The first output token went to the client (comes before the `Tokens` event that holds it)."""

    worker_id: str
    num_cached_tokens: int


class Tokens(RequestEvent, frozen=True, tag="tokens"):
    """Output tokens went to the client."""

    start: int
    num_tokens: int
    worker_id: str


class Requeued(RequestEvent, frozen=True, tag="requeued"):
    """An attempt came to nothing; the request is to be placed again."""

    attempt: int
    reason: str
    num_output_tokens: int


class Finished(RequestEvent, frozen=True, tag="finished"):
    """The one last event of an accepted request."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    status: int = 200
    """Of the failure, where there is one."""


class WorkerJoined(LifetimeEvent, frozen=True, tag="worker_joined"):
    worker_id: str
    role: Role
    num_blocks: int


class WorkerReported(LifetimeEvent, frozen=True, tag="worker_reported"):
    """A load report arrived."""

    worker_id: str
    role: Role
    load: WorkerLoad
    cost_error_ratio: float | None = None
    """Mean relative error of the worker's cost model; None before the first sample."""


class WorkerLeft(LifetimeEvent, frozen=True, tag="worker_left"):
    worker_id: str
    role: Role
    reason: str


AnyRequestEvent = Accepted | Refused | Placed | FirstToken | Tokens | Requeued | Finished
AnyWorkerEvent = WorkerJoined | WorkerReported | WorkerLeft
AnyEvent = AnyRequestEvent | AnyWorkerEvent


class Recorder(Protocol):
    """Someone who listens to lifetime events."""

    def record(self, event: AnyEvent) -> None:
        """Take note of `event`; quick, and never raises."""


class Recorders:
    """Tells several listeners, in the order given; with none it is the recorder that forgets."""

    def __init__(self, *listeners: Recorder) -> None:
        self._listeners: Sequence[Recorder] = listeners

    def record(self, event: AnyEvent) -> None:
        for listener in self._listeners:
            listener.record(event)


class EventList:
    """Keeps every event, for tests and short runs."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def record(self, event: AnyEvent) -> None:
        self.events.append(event)
