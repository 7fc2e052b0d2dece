"""The other instances with which this one shares the routed experts, as its lead reaches them: a
link to each lead, and the thread that watches the links.

All instances step together. An instance with rows sends one message that wakes the others, which
may have none. Each instance gives a sign every second. One that gives no sign for 5 s is logged;
after `timeout_s` it is lost, and all instances end. Only the first loss counts. An instance that
does not end by itself is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mooncake.base import InternalError
from mooncake.base.threads import VitalThread
from mooncake.model.parallel.group import Group, GroupError

_MESSAGE = struct.Struct("<q")
_READY, _LIVES, _LEAVES, _LOST = -1, -2, -3, -(2**62)
"""The messages. A number above zero is the step that the sender begins; `_LEAVES` - n says that the
sender's last step was step n, and `_LOST` - n that instance n is lost, so the sender ends too.
"""
_SIGN_S = 1.0
_SILENT_S = 5.0
"""After this many seconds without a sign, a worker counts as silent."""
_END_S = 10.0
"""How long others may take to end once one is lost."""
SILENT = "expert_silent_s_"
"""A counter's name before that of the worker: how long the worker has been silent so far."""
SLOW = "expert_slow_s_"
"""A counter's name before that of the worker: how long others waited for it while it was slow."""
_SLOW_TOLD_S = 60.0
"""The least time between two log lines about a slow worker."""

_log = logging.getLogger(__name__)


class Peers:
    """All other instances, seen from one of them."""

    def __init__(
        self,
        number: int,
        workers: Sequence[str],
        links: Mapping[int, socket.socket],
        processes: Mapping[int, int],
        descriptor: int,
        timeout_s: float,
    ) -> None:
        """number: the number of this instance. workers: the names of all instances' workers,
        including this one's. links: by the number of the other instance. processes: by the number
        of the other instance, a pidfd that can end its process. descriptor: of the file by which
        ranks of all instances join one group. timeout_s: the limit of an exchange, and how long an
        instance may be silent.
        """
        self.timeout_s = timeout_s
        self.number = number
        self.num_instances = len(workers)
        self.descriptor = descriptor
        self.lost: str | None = None
        """Why this instance cannot go on; None: it can."""
        self.counters = {
            f"{word}{workers[other]}": 0.0 for word in (SILENT, SLOW) for other in links
        }
        self._slow_told_s: dict[int, float] = {}
        self._workers = workers
        self._links = dict(links)
        self._processes = dict(processes)
        self._group: Group | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waited_for = set(links)
        self._ended: set[int] = set()
        """The other instances that will send nothing more."""
        self._left: dict[int, int] = {}
        """The last steps of instances that have left."""
        self._begun = 0
        """The last step that this or another instance has begun."""
        self._heard_s = dict.fromkeys(links, time.monotonic())
        self._on_wake: Callable[[int], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._on_silent: Callable[[], None] = lambda: None
        self._closed = False
        self._watch, self._bell = socket.socketpair()
        self._watcher = VitalThread(self._watch_all, "peer-watch")
        self._watcher.start()

    def use(self, group: Group) -> None:
        """Use `group`, which has the ranks of all instances. Ranks that wait in it fail when an
        instance is lost.
        """
        self._group = group

    def watch(
        self,
        on_wake: Callable[[int], None],
        on_lost: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> None:
        """Set the callbacks, which a separate thread calls: `on_wake(step)` when another instance
        begins a step, `on_lost` when one is lost, and `on_silent` while one is silent, as
        `counters` show.
        """
        self._on_wake, self._on_lost, self._on_silent = on_wake, on_lost, on_silent

    def wait_until_ready(self) -> None:
        """Announce that this instance can step. Return when all can.

        Raises:
            InternalError: one was lost.
        """
        self._tell(_READY)
        with self._changed:
            self._changed.wait_for(lambda: not self._waited_for or self.lost is not None)
        if self.lost is not None:
            raise InternalError(self.lost)

    def wake(self, step: int) -> None:
        """Tell all that this instance begins `step`. Raises GroupError when one is lost or has
        left.
        """
        self._begin(step)
        if self.lost is not None:
            raise GroupError(self.lost)
        self._tell(step)

    def fail(self, why: str, lost: int | None = None) -> None:
        """End all instances. `why` is the reason that this instance gives. lost: the number of the
        instance that is lost; None: this one. Only the first call counts. Any thread may call this.
        """
        message = _MESSAGE.pack(_LOST - (self.number if lost is None else lost))
        with self._changed:
            if self._closed or self.lost is not None:
                return
            self.lost = why
            self._changed.notify_all()
        self._stop_exchanges()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(message, socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)  # the others do so too, if they can
        self._on_lost()

    def name_slow(self, slow: Mapping[int, float], now: float) -> None:
        """Count and log which instances were slow, including this one, and for how many seconds
        others waited for them. `now`: monotonic seconds.
        """
        for number, seconds in slow.items():
            name = self._workers[number]
            if number != self.number:
                self.counters[f"{SLOW}{name}"] += seconds
            if now - self._slow_told_s.get(number, -_SLOW_TOLD_S) < _SLOW_TOLD_S:
                continue
            self._slow_told_s[number] = now
            who = "this worker" if number == self.number else name
            _log.warning(
                "%s is slow: workers with as many rows that share experts with it waited %.1f s "
                "for it; look for other load on its cores and memory",
                who, seconds,
            )  # fmt: skip

    def leave(self, step: int) -> None:
        """Tell all that this instance takes part in no step after `step`. An instance that begins
        or has begun one fails.
        """
        with contextlib.suppress(GroupError):
            self._tell(_LEAVES - step)

    def have_left(self, numbers: range) -> bool:
        """Whether these instances take part in no further step."""
        with self._lock:
            return self._ended.issuperset(numbers)

    def close(self) -> None:
        """Close the links. If an instance was lost, first wait for the others to end, and kill
        those that do not. May be called twice.
        """
        with self._changed:
            if self._closed:
                return
            if self.lost is not None:
                self._changed.wait_for(lambda: len(self._ended) == len(self._links), _END_S)
            self._closed = True
            silent = [] if self.lost is None else sorted(self._links.keys() - self._ended)
        for other in silent:
            _log.error(
                "%s shares experts with this worker and does not end: it is killed",
                self._workers[other],
            )
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._processes[other], signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._watcher.join()
        for each in (*self._links.values(), self._watch, self._bell):
            each.close()
        for process in self._processes.values():
            os.close(process)

    def _tell(self, number: int) -> None:
        for other, link in self._links.items():
            try:
                link.sendall(_MESSAGE.pack(number))
            except OSError as error:
                raise GroupError(self._has_ended(other)) from error

    def _has_ended(self, other: int) -> str:
        return f"{self._workers[other]}, which shares experts with this worker, has ended"

    def _stop_exchanges(self) -> None:
        if self._group is not None:
            self._group.fail()

    def _watch_all(self) -> None:
        poll = select.poll()
        numbers = {link.fileno(): number for number, link in self._links.items()}
        for descriptor in (*numbers, self._watch.fileno()):
            poll.register(descriptor, select.POLLIN)
        looked_s = time.monotonic()
        while True:
            left_s = max(0.0, looked_s + _SIGN_S - time.monotonic())
            for descriptor, _ in poll.poll(1e3 * left_s):
                if descriptor == self._watch.fileno():
                    return
                if not self._hear(numbers[descriptor]):
                    poll.unregister(descriptor)
            if (now := time.monotonic()) >= looked_s + _SIGN_S:
                self._look(now, now - looked_s)
                looked_s = now

    def _look(self, now: float, since_s: float) -> None:
        """Send a sign of life, and find peers that send none. `since_s`: since the last check."""
        for other, link in self._links.items():
            with contextlib.suppress(OSError):
                link.send(_MESSAGE.pack(_LIVES), socket.MSG_DONTWAIT)
            if self.lost is not None or self._waited_for or other in self._ended:
                continue
            silent_s = now - self._heard_s[other] - since_s  # this process may have been stopped
            if silent_s < _SILENT_S:
                continue
            name = self._workers[other]
            counter = f"{SILENT}{name}"
            if silent_s < _SILENT_S + since_s:
                self.counters[counter] += silent_s
                _log.warning(
                    "%s, which shares experts with this worker, has said nothing for %.0f s",
                    name, silent_s,
                )  # fmt: skip
            else:
                self.counters[counter] += since_s
            self._on_silent()
            if silent_s > self.timeout_s:
                self.fail(
                    f"{name}, which shares experts with this worker, has said nothing for "
                    f"{silent_s:.0f} s",
                    other,
                )

    def _hear(self, other: int) -> bool:
        """Act on a message of instance `other`. Return whether it may send more."""
        try:
            data = self._links[other].recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError:
            data = b""
        if len(data) < _MESSAGE.size:
            self._has_gone(other)
            self.fail(self._has_ended(other), other)
            return False
        self._heard_s[other] = time.monotonic()
        [number] = _MESSAGE.unpack(data)
        if number <= _LOST:
            self._is_told(_LOST - number, other)
            return True
        if number <= _LEAVES:
            self._left[other] = _LEAVES - number
            self._begin(0)
            self._has_gone(other)
            return False
        if number == _READY:
            with self._changed:
                self._waited_for.discard(other)
                self._changed.notify_all()
        elif number > 0:
            self._begin(number)
            self._on_wake(number)
        return True

    def _is_told(self, lost: int, other: int) -> None:
        """Fail, because instance `other` ends for the loss of one. Name the one that was lost."""
        if lost not in self._links or lost == other:
            self.fail(self._has_ended(other), other)
        else:
            self.fail(
                f"{self._workers[lost]}, which shares experts with this worker, is lost, as "
                f"{self._workers[other]} says",
                lost,
            )

    def _begin(self, step: int) -> None:
        """Note that an instance has begun a step. Fail if an instance that has left does not take
        part in it: an exchange would wait for it, and a GPU whose exchange is stopped goes on with
        whatever its memory holds.
        """
        with self._changed:
            self._begun = max(self._begun, step)
            missed = [other for other, last in self._left.items() if last < self._begun]
        if missed:
            self.fail(self._has_ended(missed[0]), missed[0])

    def _has_gone(self, other: int) -> None:
        with self._changed:
            self._ended.add(other)
            self._changed.notify_all()
