"""The port behind the API server, where requests go in and events with tokens come out, and the
gateway machine as that port: an asyncio loop drives it with messages, timers and calls.

All calls are made from one event loop, except `metrics` and `worker_lost_threadsafe`. Nothing here
knows HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from mooncake.base import (
    Clock,
    FinalEvent,
    GenerateRequest,
    MooncakeError,
    OutputEvent,
    Sink,
    Unavailable,
)
from mooncake.base.cluster_mode import ClusterMode

if TYPE_CHECKING:
    from mooncake.rpc.channel import PolledChannel
    from mooncake.scheduler.gateway.gateway import Gateway
    from mooncake.scheduler.gateway.mode_control import Done, ModeControl
    from mooncake.scheduler.gateway.status import ClusterStatus

_log = logging.getLogger(__name__)

SUBMIT_S = 0.005
"""A call submits its requests for so long at a time: a place for one is found in milliseconds."""
ABORTS_AT_ONCE = 32
MAX_READS_A_TURN = 64
"""The most reads of the channel before the loop's other tasks run."""
ORDER_S = 600.0
"""An operator's order that is not carried out by then is answered by what it waits for, and goes
on.
"""
RETRY_TICK_S = 1.0
"""Seconds until the next tick after one that failed."""


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
        """Return the metrics in Prometheus' text format; those of tenants only for an operator. Any
        thread may call this.
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


class GatewayBackend:
    """A `Backend` over the gateway machine, which also takes operators' orders for the whole
    cluster. Call `start` and `stop` in the loop. `metrics` renders the series that the machine's
    recorder keeps, for an operator or for others.
    """

    def __init__(
        self,
        gateway: Gateway,
        inbox: PolledChannel,
        clock: Clock,
        *,
        metrics: Callable[[bool], bytes],
    ) -> None:
        self._gateway = gateway
        self._inbox = inbox
        self._clock = clock
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None
        self._draining = False

    def start(self) -> None:
        """Start to read the channel and to call the machine's ticks, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fileno(), self._schedule_turn)
        self._schedule_turn()

    def stop(self) -> None:
        """Stop both. Their owner keeps the machine and the channel."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.remove_reader(self._inbox.fileno())
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None

    @property
    def ready(self) -> bool:
        return self._loop is not None and not self._draining and self._gateway.ready

    @property
    def missing(self) -> Sequence[str]:
        return self._gateway.missing

    @property
    def has_waiting_batch(self) -> bool:
        return self._gateway.has_waiting_batch

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self._gateway.submit(request, sink, self._clock.now())
        self._schedule_turn()

    def abort(self, request_id: str) -> None:
        self._gateway.abort(request_id, self._clock.now())
        self._schedule_turn()

    def status(self) -> ClusterStatus:
        return self._gateway.status(self._clock.now())

    def metrics(self, for_operator: bool) -> bytes:
        return self._metrics(for_operator)

    def drain(self) -> None:
        self._draining = True
        self._gateway.drain(self._clock.now())
        self._schedule_turn()

    @property
    def mode(self) -> ClusterMode:
        """The mode that is wanted now."""
        return self._gateway.control.mode

    async def order(self, give: Callable[[ModeControl, Done], None]) -> None:
        """Give an order, such as `lambda control, done: control.wake(done)`. Return when it is
        carried out. It goes on when its caller gives up.

        Raises:
            MooncakeError: it cannot be carried out, or takes long; the message says what it waits
                for.
        """
        done: asyncio.Future[MooncakeError | None] = asyncio.get_running_loop().create_future()

        def end(error: MooncakeError | None) -> None:
            if not done.done():  # its caller is gone
                done.set_result(error)

        control = self._gateway.control
        give(control, end)
        self._schedule_turn()
        try:
            async with asyncio.timeout(ORDER_S):
                error = await done
        except TimeoutError:
            text = f"not yet carried out: {control.waits_for}"
            raise Unavailable(text, retry_after_s=RETRY_TICK_S) from None
        if error is not None:
            raise error

    def worker_lost_threadsafe(self, worker_id: str) -> None:
        """Report to the machine that a worker's process ended; callable from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._worker_lost, worker_id)

    def _worker_lost(self, worker_id: str) -> None:
        self._gateway.worker_lost(worker_id, self._clock.now())
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        """Have the loop read and tick once, however often this is called before it does."""
        if self._loop is not None and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._loop is None:
            return
        # A channel's descriptor may be edge-triggered, so it is read until nothing is left.
        retry_s: float | None = None
        try:
            for _ in range(MAX_READS_A_TURN):
                events = self._inbox.receive()
                if not events:
                    break
                for event in events:
                    self._handle(event)
            else:
                self._schedule_turn()
        except Exception:  # ticks must go on: they end requests that nobody answers
            _log.exception("the gateway cannot read its channel")
            retry_s = self._clock.now() + RETRY_TICK_S
        now = self._clock.now()
        try:
            wake_s = self._gateway.tick(now)
        except Exception:  # as below: other requests must go on
            _log.exception("the gateway failed on a tick")
            wake_s = now + RETRY_TICK_S
        if retry_s is not None:
            wake_s = retry_s if wake_s is None else min(wake_s, retry_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_s is not None:
            self._timer = self._loop.call_later(max(0.0, wake_s - now), self._schedule_turn)

    def _handle(self, event: msgspec.Struct) -> None:
        try:
            self._gateway.handle(event, self._clock.now())
        except Exception:  # one bad message must not stop the gateway
            _log.exception("the gateway failed on a %s", type(event).__name__)
