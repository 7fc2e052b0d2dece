"""The port behind the API server: requests go in, events with tokens come out.

All calls are made from one event loop. Nothing here knows HTTP or text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mooncake.base import FinalEvent, GenerateRequest, MooncakeError, OutputEvent, Sink

SUBMIT_S = 0.005
"""A call submits its requests for so long at a time: a place for one is found in milliseconds."""
ABORTS_AT_ONCE = 32


class LatencyLimits(NamedTuple):
    """A call's own limits on latency; None = the server's."""

    ttft_s: float | None = None
    tbt_s: float | None = None


NO_LIMITS = LatencyLimits()


class Backend(Protocol):
    """The generating side. The last event of every submitted request is its one `FinalEvent`. After
    `abort` it comes without waiting for the model.
    """

    @property
    def ready(self) -> bool:
        """True if a request would be placed now: the workers are there and nothing drains."""

    @property
    def missing(self) -> Sequence[str]:
        """The roles that a request needs and that no worker has now."""

    @property
    def has_waiting_batch(self) -> bool:
        """True if work of the class batch waits until capacity is idle."""

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Start a request; `sink` gets its events. A refusal comes as its `FinalEvent`."""

    def abort(self, request_id: str) -> None:
        """End a request early. Unknown and ended ones are ignored."""

    def status(self) -> Any:
        """Return what `mooncake status` shows: anything that msgspec encodes as a JSON object."""

    def metrics(self, for_operator: bool) -> bytes:
        """Return the metrics in Prometheus' text format; those of tenants only for an operator.
        From any thread.
        """

    def drain(self) -> None:
        """Accept no new requests from now on; finish those that run."""


class EventStream:
    """The events of all requests of one call, merged in order of arrival.

    Leaving the `async with` block aborts the requests that have not ended. The queue holds at most
    `max_tokens` + 1 events for each request. So a slow reader never slows the engine and costs no
    more memory than its whole answer.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerateRequest]) -> None:
        self._backend = backend
        self._requests = requests
        self._open: dict[str, None] = {}
        self._pending: list[OutputEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: MooncakeError | None = None

    @property
    def num_dropped_tokens(self) -> int:
        """Number of tokens that were generated and are in no event."""
        return 0

    async def __aenter__(self) -> EventStream:
        turn_ends_s = time.monotonic() + SUBMIT_S
        try:
            for request in self._requests:
                if time.monotonic() > turn_ends_s:
                    await asyncio.sleep(0)  # other tasks' turn
                    turn_ends_s = time.monotonic() + SUBMIT_S
                self._open[request.request_id] = None
                self._backend.submit(request, self._take)
        except BaseException:
            self._abort_open()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._abort_open()

    async def batch(self) -> list[OutputEvent]:
        """Wait for events and return all since the last call; [] at the end.

        Raises:
            MooncakeError: the call was ended from outside by `fail`.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if not self._open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    def abort(self, request_id: str) -> None:
        """End one request early; its `FinalEvent` still comes."""
        if request_id in self._open:
            self._backend.abort(request_id)

    def fail(self, error: MooncakeError) -> None:
        """End the call: `batch` raises `error` once it has returned what had arrived."""
        self._failure = error
        self._wake()

    def _take(self, event: OutputEvent) -> None:
        if event.request_id not in self._open:
            return
        if isinstance(event, FinalEvent):
            del self._open[event.request_id]
        self._pending.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _abort_open(self) -> None:
        """Abort the requests that have not ended: some now, the others in the loop's next turns."""
        ids, self._open = list(self._open), {}
        self._abort_some(ids)

    def _abort_some(self, ids: list[str]) -> None:
        for request_id in ids[:ABORTS_AT_ONCE]:
            self._backend.abort(request_id)
        if left := ids[ABORTS_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._abort_some, left)
