"""The other instances with which this one holds the routed experts, as its lead reaches them: a
link to each lead, and the thread that watches the links.

All step together. Who has rows says so to the others, which may have none and wait: one message
wakes them. The first that is lost ends all, once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping

from mooncake.base import InternalError
from mooncake.model.parallel.group import Group, GroupError

_MESSAGE = struct.Struct("<q")
_LEAVES, _READY = 0, -1
"""Messages; one above zero is the number of a step that the sender begins."""


class Peers:
    """All other instances, seen from one of them."""

    def __init__(
        self, number: int, links: Mapping[int, socket.socket], descriptor: int, timeout_s: float
    ) -> None:
        """number: of this instance. links: by the number of the other. descriptor: of the file by
        which ranks of all instances join one group. timeout_s: of an exchange.
        """
        self.timeout_s = timeout_s
        self.number = number
        self.num_instances = len(links) + 1
        self.descriptor = descriptor
        self.lost: str | None = None
        """Why this instance cannot go on; None: it can."""
        self._links = dict(links)
        self._group: Group | None = None
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._waited_for = set(links)
        self._on_wake: Callable[[int], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._closed = False
        self._watch, self._bell = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch_all, name="peer-watch", daemon=True)
        self._watcher.start()

    def use(self, group: Group) -> None:
        """Have ranks that wait in `group`, of the ranks of all instances, hear when one is lost."""
        self._group = group

    def watch(self, on_wake: Callable[[int], None], on_lost: Callable[[], None]) -> None:
        """Have `on_wake(step)` called when another instance begins a step, and `on_lost` when one
        is lost; both in a thread of their own.
        """
        self._on_wake, self._on_lost = on_wake, on_lost

    def wait_until_ready(self) -> None:
        """Say that this instance can step, and return when all can.

        Raises:
            InternalError: one was lost.
        """
        self._tell(_READY)
        with self._ready:
            self._ready.wait_for(lambda: not self._waited_for or self.lost is not None)
        if self.lost is not None:
            raise InternalError(self.lost)

    def wake(self, step: int) -> None:
        """Tell all that this instance begins `step`. GroupError: one is lost."""
        if self.lost is not None:
            raise GroupError(self.lost)
        self._tell(step)

    def fail(self, why: str) -> None:
        """End all instances: `why` is what the runner of this one says. Only the first call counts.
        From any thread.
        """
        with self._ready:
            if self._closed or self.lost is not None:
                return
            self.lost = why
            self._ready.notify_all()
        self._stop_exchanges()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._on_lost()

    def leave(self) -> None:
        """Tell all that this instance takes part in no further step: who wants one then fails."""
        with contextlib.suppress(GroupError):
            self._tell(_LEAVES)

    def close(self) -> None:
        """Close the links. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._watcher.join()
        for each in (*self._links.values(), self._watch, self._bell):
            each.close()

    def _tell(self, number: int) -> None:
        for other, link in self._links.items():
            try:
                link.sendall(_MESSAGE.pack(number))
            except OSError as error:
                raise GroupError(f"instance {other} of this expert group has ended") from error

    def _stop_exchanges(self) -> None:
        if self._group is not None:
            self._group.fail()

    def _watch_all(self) -> None:
        poll = select.poll()
        numbers = {link.fileno(): number for number, link in self._links.items()}
        for descriptor in (*numbers, self._watch.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._watch.fileno():
                    return
                if not self._hear(numbers[descriptor]):
                    poll.unregister(descriptor)

    def _hear(self, other: int) -> bool:
        """Act on what instance `other` says; return whether it may say more."""
        try:
            data = self._links[other].recv(_MESSAGE.size, socket.MSG_WAITALL)
        except OSError:
            data = b""
        if len(data) < _MESSAGE.size:
            self.fail(f"instance {other} of this expert group has ended")
            return False
        [number] = _MESSAGE.unpack(data)
        if number == _LEAVES:
            self._stop_exchanges()
            return False
        if number == _READY:
            with self._ready:
                self._waited_for.discard(other)
                self._ready.notify_all()
        else:
            self._on_wake(number)
        return True
