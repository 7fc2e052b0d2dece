"""Connected sockets without a network, and an I/O loop that the caller turns."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, IoLoop, Timer

BUFFER_BYTES = 2**20


class PairedSocket(socket.socket):
    """One end of a pair that takes the options of TCP and has its addresses."""

    def setsockopt(self, level: int, *rest: Any) -> None:
        """Set an option, unless it is one of TCP."""
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *rest)

    def getsockname(self) -> Any:
        return ("127.0.0.1", 1)

    def getpeername(self) -> Any:
        return ("127.0.0.2", 2)

    def connect_ex(self, address: Any) -> int:
        """Do nothing: it is connected."""
        return 0


def pair() -> tuple[PairedSocket, PairedSocket]:
    """Return two connected ends; neither blocks."""
    ends = socket.socketpair()
    made = []
    for end in ends:
        one = PairedSocket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=end.detach())
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        made.append(one)
    return made[0], made[1]


class LoopStub(IoLoop):
    """An `IoLoop` without a thread: `run` calls the handler of a socket, then what was posted."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.scratch = memoryview(bytearray(4096))
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.watched: dict[int, int] = {}
        """The events that each handler waits for."""
        self.timers: list[Timer] = []
        self._calls: deque[Callable[[], None]] = deque()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        self.timers.append(Timer(action))
        return self.timers[-1]

    def add(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self.handlers[fd], self.watched[fd] = handler, events

    def modify(self, fd: int, events: int) -> None:
        assert fd in self.handlers
        self.watched[fd] = events

    def remove(self, fd: int) -> None:
        self.handlers.pop(fd, None)

    def run(self, sock: socket.socket, events: int = READABLE) -> None:
        """Let `sock` have an event, if it is watched for that."""
        handler = self.handlers.get(sock.fileno())
        if handler is not None and events & (self.watched[sock.fileno()] | HUNG_UP):
            handler(events)
        while self._calls:
            self._calls.popleft()()
