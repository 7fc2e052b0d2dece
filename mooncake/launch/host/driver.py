"""The loop that drives one machine in real life: wait for events or the next timer, hand them over.

Owns the thread it runs in and nothing else. The simulator has its own loop; decision code does not
know which of the two drives it.
"""

from __future__ import annotations

import dataclasses
import logging
import selectors
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from mooncake.base import Clock, Machine, MonotonicClock, MooncakeError, PeerLost, WorkerRef
from mooncake.base.mailbox import Mailbox, Polled
from mooncake.transfer.engine import PolledTransfer

_log = logging.getLogger(__name__)


class EventSource(Protocol):
    """A source of events for a loop; a `PolledChannel` is one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when an event has come."""

    def receive(self) -> Sequence[msgspec.Struct]:
        """Return the events that have come, oldest first, without waiting."""


class FencedOff(MooncakeError):
    """The cluster gave this worker up because it paused too long. Peers have reclaimed what it
    held.
    """


@dataclasses.dataclass(frozen=True)
class _Call:
    """Work of another thread, to be done between two events."""

    work: Callable[[Any, float], Any]
    future: Future[Any]


class Driver:
    """Drives `machine` until `stop`; a fault in the machine ends the loop and is raised.

    A machine that raised may have lost what it held, so it is never driven again: its process ends,
    a new one takes its place, and all peers are told.
    """

    def __init__(
        self,
        machine: Machine,
        channel: EventSource,
        *,
        transfer: PolledTransfer | None = None,
        polled: Sequence[Polled[msgspec.Struct]] = (),
        clock: Clock | None = None,
        own: WorkerRef | None = None,
    ) -> None:
        """Drive `machine`, whose name in the cluster is `own` (workers have one). `polled`: its
        other ports.
        """
        self._machine = machine
        self._own = own
        self._clock = clock or MonotonicClock()
        self._sources: list[tuple[int, Callable[[], Sequence[msgspec.Struct]]]] = [
            (channel.fileno(), channel.receive)
        ]
        if transfer is not None:
            self._sources.append((transfer.fileno(), transfer.events))
        self._sources += [(port.fileno(), port.poll) for port in polled]
        self._lock = threading.Lock()
        self._calls: Mailbox[_Call] = Mailbox()
        self._stopping = False
        self._leaving: tuple[Callable[[Any], bool], float | None] | None = None
        self._ended = False

    def run(self) -> None:
        """Drive until `stop`. Call it once.

        Raises:
            Exception: whatever the machine raised; it has been logged with its trace.
        """
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._calls, selectors.EVENT_READ)
                for descriptor, _ in self._sources:
                    selector.register(descriptor, selectors.EVENT_READ)
                self._loop(selector)
        except FencedOff as error:
            _log.error("%s", error.message)
            raise
        except Exception:
            _log.exception("%s failed and cannot go on", type(self._machine).__name__)
            raise
        finally:
            self._end()

    def stop(self) -> None:
        """Ask the loop to end; from any thread, any number of times."""
        self._stopping = True
        self._calls.ring()

    def stop_when(self, done: Callable[[Any], bool], limit_s: float | None) -> None:
        """Ask the loop to end once `done(machine)`, or after `limit_s`; from any thread."""
        self._leaving = (done, None if limit_s is None else self._clock.now() + limit_s)
        self._calls.ring()

    def call(self, work: Callable[[Any, float], Any]) -> Future[Any]:
        """Run `work(machine, now)` between two events, in the loop's thread.

        A fault in `work` belongs to the caller and is set in the future. If the loop has ended, or
        ends before the work runs, the future is cancelled.
        """
        call = _Call(work, Future())
        with self._lock:
            if not self._ended:
                self._calls.put(call)
                return call.future
        call.future.cancel()
        return call.future

    def _loop(self, selector: selectors.BaseSelector) -> None:
        clock, machine = self._clock, self._machine
        while True:
            now = clock.now()
            wake_s = machine.tick(now)
            if self._leaving is not None:
                done, limit_s = self._leaving
                self._stopping |= done(machine)
                if limit_s is not None:
                    self._stopping |= now >= limit_s
                    wake_s = limit_s if wake_s is None else min(wake_s, limit_s)
            if self._stopping:
                return
            selector.select(None if wake_s is None else max(0.0, wake_s - now))
            now = clock.now()
            self._do_calls(now)
            # All sources each time: a look at an empty one is cheap, and descriptors of the
            # edge-triggered kind never strand an event.
            for _, drain in self._sources:
                for event in drain():
                    if isinstance(event, PeerLost) and event.worker == self._own:
                        raise FencedOff(
                            f"{event.worker.worker_id} was given up by the cluster and ends: it "
                            "stood still for too long, or another came under its name; start it "
                            "again, each node with a --node-id of its own"
                        )
                    machine.handle(event, now)

    def _do_calls(self, now: float) -> None:
        for call in self._calls.receive():
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                call.future.set_result(call.work(self._machine, now))
            except Exception as error:
                call.future.set_exception(error)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        self._calls.close()
        for call in self._calls.receive():
            call.future.cancel()
