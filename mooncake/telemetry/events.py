"""The named events in the life of a request and of a worker, each with its time. All latency
metrics and traces are derived from these alone.

Values only. The gateway makes the events; `launch` decides who receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from mooncake.base import FinishReason, Role, WorkerLoad
from mooncake.base.request import CacheUse, WorkSpan
from mooncake.telemetry.receipt import PlacementFacts


class LifetimeEvent(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"
):
    """The base of all events; `at_s` is on the driver's clock."""

    at_s: float


class RequestEvent(LifetimeEvent, frozen=True, kw_only=True):
    """The base of the events of one request."""

    request_id: str


class Accepted(RequestEvent, frozen=True, tag="accepted"):
    """The request holds a permit. Exactly one `Finished` follows."""

    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None


class Refused(RequestEvent, frozen=True, tag="refused"):
    """The request was refused before any work. No other event of it follows."""

    status: int
    reason: str
    """A short name of the reason, such as "ttft_limit"."""
    facts: PlacementFacts | None = None
    """What the workers were chosen from that it would have had, where receipts are kept."""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None


class Placed(RequestEvent, frozen=True, tag="placed"):
    """Workers were chosen and got their tasks. `attempt` is above 1 after a lost attempt."""

    attempt: int
    prefill: str | None
    decode: str
    predicted_ttft_s: float
    """The predicted time from this moment on, by the cost models."""
    predicted_tbt_s: float
    num_cached_tokens: int
    """Prompt tokens that the Conductor expects to be reused."""
    num_fetch_blocks: int = 0
    facts: PlacementFacts | None = None
    """What the choice was made from, where receipts are kept."""


class Worked(RequestEvent, frozen=True, tag="worked"):
    """A worker reported what it did for a traced request."""

    attempt: int
    spans: tuple[WorkSpan, ...]


class FirstToken(RequestEvent, frozen=True, tag="first_token"):
    """The first output token went to the client (recorded before its `Tokens` event)."""

    worker_id: str
    num_cached_tokens: int
    cache: CacheUse | None = None
    """None: the prompt was computed without a cache."""


class Tokens(RequestEvent, frozen=True, tag="tokens"):
    """Output tokens went to the client."""

    start: int
    num_tokens: int
    worker_id: str


class Requeued(RequestEvent, frozen=True, tag="requeued"):
    """An attempt was lost; the request will be placed again."""

    attempt: int
    reason: str
    num_output_tokens: int


class Finished(RequestEvent, frozen=True, tag="finished"):
    """The last event of an accepted request. Each has exactly one."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    status: int = 200
    """The HTTP status of the failure, or 200."""


class WorkerJoined(LifetimeEvent, frozen=True, tag="worker_joined"):
    """A worker was welcomed."""

    worker_id: str
    role: Role
    num_blocks: int
    node_id: str = ""
    """Empty for gateways, whose node is not shown."""


class WorkerReported(LifetimeEvent, frozen=True, tag="worker_reported"):
    """A load report came."""

    worker_id: str
    role: Role
    load: WorkerLoad
    cost_error_ratio: float | None = None
    """The mean relative error of the worker's cost model; None before the first sample."""
    clock_s: float = 0.0
    """What the worker's own clock showed when it sent the report."""


class WorkerLeft(LifetimeEvent, frozen=True, tag="worker_left"):
    """A worker left or was lost."""

    worker_id: str
    role: Role
    reason: str


class ReplicasWanted(LifetimeEvent, frozen=True, tag="replicas_wanted"):
    """The scaling policy has looked at the cluster."""

    role: Role
    now: int
    """Replicas that are there."""
    wanted: int
    """Replicas that the load needs, inside the bounds."""


class LoopHeld(LifetimeEvent, frozen=True, tag="loop_held"):
    """Something occupied the gateway's event loop, so that no stream moved."""

    held_s: float


class BatchesSeen(LifetimeEvent, frozen=True, tag="batches_seen"):
    """The gateway looked at the batches that it runs."""

    num_batches: int
    num_lines_asked: int
    """Lines that are being asked now."""
    num_lines_left: int
    """Lines without a result, those that are being asked among them."""


AnyRequestEvent = Accepted | Refused | Placed | Worked | FirstToken | Tokens | Requeued | Finished
AnyWorkerEvent = WorkerJoined | WorkerReported | WorkerLeft
AnyEvent = AnyRequestEvent | AnyWorkerEvent | ReplicasWanted | LoopHeld | BatchesSeen


class Recorder(Protocol):
    """A receiver of lifetime events."""

    def record(self, event: AnyEvent) -> None:
        """Take `event`. This must be quick and never raise."""


class Recorders:
    """Passes each event to several recorders, in the given order. It ignores events if it has no
    recorder.
    """

    def __init__(self, *listeners: Recorder) -> None:
        self._listeners: Sequence[Recorder] = listeners

    def add(self, listener: Recorder) -> None:
        """Pass events to one more recorder, after the others."""
        self._listeners = (*self._listeners, listener)

    def record(self, event: AnyEvent) -> None:
        for listener in self._listeners:
            listener.record(event)


class EventList:
    """Keeps every event, for tests and short runs."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def record(self, event: AnyEvent) -> None:
        self.events.append(event)
