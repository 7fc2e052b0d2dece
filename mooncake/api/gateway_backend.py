"""Drives the gateway machine from an asyncio loop: messages, timers, calls of the API server.

Owns the loop's side only: reader, timer, hand-over between threads. Every call into the machine is
made in the loop's thread; other threads may call `worker_lost_threadsafe` only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from mooncake.base import Clock, GenerateRequest, MooncakeError, Sink, Unavailable
from mooncake.base.cluster_mode import ClusterMode

if TYPE_CHECKING:
    from mooncake.rpc.channel import PolledChannel
    from mooncake.scheduler.gateway.gateway import Gateway
    from mooncake.scheduler.gateway.mode_control import Done, ModeControl
    from mooncake.scheduler.gateway.status import ClusterStatus

_log = logging.getLogger(__name__)

MAX_READS_A_TURN = 64
"""The most reads of the channel before the loop's other tasks run."""


ORDER_S = 600.0
"""An operator's order that is not carried out by then is answered by what it waits for, and goes
on.
"""
RETRY_TICK_S = 1.0
"""Seconds until the next tick after one that failed."""


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
