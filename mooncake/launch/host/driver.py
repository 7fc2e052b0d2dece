"""The loop that drives one machine in real life: wait for events or the next timer, hand them over.

Owns the thread it runs in and nothing else. Other threads may take a turn with the machine where
its owner allows that. The simulator has its own loop; decision code does not know which of the two
drives it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import selectors
import signal
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
    """The cluster gave this worker up, because it paused too long or another has its name. Peers
    have reclaimed what it held.
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
        shares: bool = False,
        returns: bool = False,
    ) -> None:
        """Drive `machine`, whose name in the cluster is `own` (workers have one). `polled`: its
        other ports. `shares`: any thread may use all of its ports. Then a thread that calls, or
        that has an event of `transfer`, drives the machine itself, unless another thread does so.
        This saves waking the loop's thread. `returns`: the machine is told when the cluster has
        given it up, and comes back; otherwise `run` raises FencedOff then.
        """
        self._machine = machine
        self._own = own
        self._returns = returns
        self._clock = clock or MonotonicClock()
        self._sources: list[tuple[int, Callable[[], Sequence[msgspec.Struct]]]] = [
            (channel.fileno(), channel.receive)
        ]
        if transfer is not None:
            self._sources.append((transfer.fileno(), transfer.events))
        self._shared = [transfer.events] if shares and transfer is not None else []
        self._may_share = False
        """True while `run` goes on, if turns are shared."""
        self._turn = threading.Lock()
        """Held by the thread that drives the machine."""
        self._rests_until_s = math.inf
        self._fault: BaseException | None = None
        """What the machine raised in another thread."""
        self._last: list[Callable[[], object]] = []
        self._sources += [(port.fileno(), port.poll) for port in polled]
        self._lock = threading.Lock()
        self._calls: Mailbox[_Call] = Mailbox()
        self._stopping = False
        self._leaving: tuple[Callable[[Any], bool], float | None] | None = None
        self._awaited: tuple[Callable[[Any], bool], Callable[[], object]] | None = None
        self._ended = False
        if shares and transfer is not None:
            transfer.offer_events(self._take_turn)

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
        """Ask the loop to end. Any thread may call this, more than once."""
        self._stopping = True
        self._calls.ring()

    def stop_when(self, done: Callable[[Any], bool], limit_s: float | None) -> None:
        """Ask the loop to end once `done(machine)`, or after `limit_s`. Any thread may call
        this.
        """
        self._leaving = (done, None if limit_s is None else self._clock.now() + limit_s)
        self._calls.ring()

    def once(self, holds: Callable[[Any], bool], then: Callable[[], object]) -> None:
        """Call `then` at the first time that `holds(machine)` once the machine has done what is
        due. Call this before `run`; it replaces an earlier call.
        """
        self._awaited = (holds, then)

    def call(self, work: Callable[[Any, float], Any]) -> Future[Any]:
        """Run `work(machine, now)` between two events, in the loop's thread or, if turns are
        shared, the caller's.

        A fault in `work` belongs to the caller and is set in the future. If the loop has ended, or
        ends before the work runs, the future is cancelled.
        """
        call = _Call(work, Future())
        if self._may_share:
            with _Uninterrupted():
                if self._take_turn([call]):
                    return call.future
        with self._lock:
            if not self._ended:
                self._calls.put(call)
                return call.future
        call.future.cancel()
        return call.future

    def at_end(self, call: Callable[[], object]) -> None:
        """Have `call` called once the machine has done what is due, by the thread that drives it
        now. So a thread that it wakes does not wait for that.
        """
        self._last.append(call)

    def _loop(self, selector: selectors.BaseSelector) -> None:
        # All sources each time: a look at an empty one is cheap, and descriptors of the
        # edge-triggered kind never strand an event.
        drains = [drain for _, drain in self._sources]
        while True:
            with self._turn:
                self._raise_fault()
                self._may_share = bool(self._shared)
                rest_s = self._tick()
                last, self._last = self._last, []
            for call in last:
                call()
            if self._stopping:
                return
            selector.select(rest_s)
            with self._turn:
                self._raise_fault()
                self._drive(self._calls.receive(), drains)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _take_turn(self, calls: Sequence[_Call] = ()) -> bool:
        """Drive the machine in the caller's thread: do `calls`, and hand it the events of the
        transfer engine. It ticks after calls, and when there are no events. Return False, with
        nothing done, if another thread drives it now, or the loop does not run.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if not self._may_share:
                return False
            if self._drive(calls, self._shared) and not calls:
                return True
            rests_until_s = self._rests_until_s
            self._tick()
            if self._stopping or self._rests_until_s < rests_until_s:
                self._calls.ring()
            self._rests_until_s = min(rests_until_s, self._rests_until_s)
            last, self._last = self._last, []
        except BaseException as error:
            self._may_share, self._fault = False, error
            self._calls.ring()
            if not isinstance(error, Exception):
                raise
            return True
        finally:
            self._turn.release()
        for call in last:
            call()
        return True

    def _drive(
        self,
        calls: Sequence[_Call],
        drains: Sequence[Callable[[], Sequence[msgspec.Struct]]],
    ) -> bool:
        """Do calls, and hand the machine what has come. Return whether there was any event."""
        now, had_some = self._clock.now(), False
        for call in calls:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                call.future.set_result(call.work(self._machine, now))
            except Exception as error:
                call.future.set_exception(error)
        for drain in drains:
            for event in drain():
                if isinstance(event, PeerLost) and event.worker == self._own:
                    self._on_own_loss(event)
                self._machine.handle(event, now)
                had_some = True
        return had_some

    def _on_own_loss(self, event: PeerLost) -> None:
        """Raise FencedOff unless the machine comes back by itself: the cluster gave it up."""
        name = event.worker.worker_id
        if event.replaced:
            raise FencedOff(
                f"{name} ends: another worker took its name; give each node a --node-id of its own"
            )
        if not self._returns:
            raise FencedOff(
                f"the cluster has given {name} up, so it ends: it was silent for too long, because "
                "it stood still or had no network; start it again"
            )
        _log.warning(
            "the cluster has given %s up, as it was silent for too long: it ends its requests "
            "and comes back with its weights", name,
        )  # fmt: skip

    def _tick(self) -> float | None:
        """Have the machine do what is due, and look whether the loop may end. Return how long
        nothing is due.
        """
        now = self._clock.now()
        wake_s = self._machine.tick(now)
        if self._awaited is not None and self._awaited[0](self._machine):
            self._last.append(self._awaited[1])
            self._awaited = None
        if self._leaving is not None:
            done, limit_s = self._leaving
            self._stopping |= done(self._machine)
            if limit_s is not None:
                self._stopping |= now >= limit_s
                wake_s = limit_s if wake_s is None else min(wake_s, limit_s)
        self._rests_until_s = math.inf if wake_s is None else wake_s
        return None if wake_s is None else max(0.0, wake_s - now)

    def _end(self) -> None:
        with self._turn:
            self._may_share = False
        with self._lock:
            self._ended = True
        self._calls.close()
        for call in self._calls.receive():
            call.future.cancel()


class _Uninterrupted:
    """Keeps Ctrl-C back within: it must not leave a machine with half of a change."""

    def __init__(self) -> None:
        is_main = threading.get_ident() == threading.main_thread().ident
        handler = signal.getsignal(signal.SIGINT) if is_main else None
        self._handler: Callable[..., object] | None = handler if callable(handler) else None
        self._came: list[Any] = []

    def __enter__(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._keep)

    def _keep(self, *about: Any) -> None:
        self._came.append(about)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(*self._came[0])
