"""A thread that waits on many sockets and serves all connections of a backend.

Handlers, timers and posted calls run in the loop's own thread, so what a connection owns needs no
lock. `gate` is held around each syscall that touches registered memory.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable

from mooncake.base.mailbox import Mailbox
from mooncake.base.threads import VitalThread
from mooncake.transfer.regions import Gates

_LOG = logging.getLogger(__name__)
READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
HUNG_UP = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
SCRATCH_BYTES = 2**20

_HERE = threading.local()
"""Its `loop` is the loop whose thread this is."""
Handler = Callable[[int], None]
"""Called with the epoll events of a descriptor; must not raise and must not wait."""


class Timer:
    """An action to run later; `cancel` forgets it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Forget the action, if it has not run yet."""
        self._action = None

    def fire(self) -> None:
        """Run the action unless it was cancelled."""
        action, self._action = self._action, None
        if action is not None:
            action()


class IoLoop:
    """A thread that waits with epoll. `post` may be called from any thread, all else only from the
    loop's own.
    """

    def __init__(self, gates: Gates, name: str) -> None:
        self._gates = gates
        self.gate = gates.new()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """Receives bytes that are to be dropped."""
        self._epoll = select.epoll()
        self._posted: Mailbox[Callable[[], None]] = Mailbox()
        self._own: list[Callable[[], None]] = []
        """What the loop's own thread has posted."""
        self._epoll.register(self._posted, READABLE)
        self._handlers: dict[int, Handler] = {}
        self._removed: set[int] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = VitalThread(self._run, name)
        self._thread.start()

    @property
    def num_handlers(self) -> int:
        """Descriptors watched now."""
        return len(self._handlers)

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop soon; after `close` it is forgotten."""
        if self.post_here(call):
            return
        with self._lock:
            if self._closing:
                return
            self._posted.put(call)

    @staticmethod
    def here() -> IoLoop | None:
        """Return the loop whose thread this is, if it is one's."""
        return getattr(_HERE, "loop", None)

    @property
    def has_posts(self) -> bool:
        """True if the loop's own thread has posted calls that did not run yet."""
        return bool(self._own)

    def post_here(self, call: Callable[[], None]) -> bool:
        """Run `call` after what the loop does now, if this is the loop's own thread and it goes on.
        Return whether it is.
        """
        will = IoLoop.here() is self and not self._closing
        if will:
            self._own.append(call)
        return will

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run `action` in the loop after `seconds` of real time."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def add(self, fd: int, events: int, handler: Handler) -> None:
        """Watch `fd`."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events | select.EPOLLRDHUP)

    def modify(self, fd: int, events: int) -> None:
        """Change the events that are watched."""
        self._epoll.modify(fd, events | select.EPOLLRDHUP)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; call it before `fd` is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._removed.add(fd)

    def _run(self) -> None:
        _HERE.loop = self
        while not self._closing:
            ready = self._epoll.poll(self._wait_s())
            self._removed.clear()
            for fd, events in ready:
                # A number removed in this round may name another connection by now.
                if fd in self._removed or fd == self._posted.fileno():
                    continue
                try:
                    self._handlers[fd](events)
                except Exception:  # one broken connection must not take all others with it
                    _LOG.exception("transfer I/O handler failed")
            self._run_posted()
            self._run_timers()
        self._run_posted()

    def _wait_s(self) -> float | None:
        if self._own:
            return 0.0
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _run_posted(self) -> None:
        own, self._own = self._own, []
        for call in (*own, *self._posted.receive()):
            self._guarded(call)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guarded(heapq.heappop(self._timers)[2].fire)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _LOG.exception("transfer I/O handler failed")

    def close(self) -> None:
        """Run what was posted before, then end the thread. The caller has removed all handlers."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._posted.ring()
        self._thread.join()
        self._timers.clear()
        self._epoll.close()
        self._posted.close()
        self._gates.forget(self.gate)
