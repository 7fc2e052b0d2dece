"""Which peers have ended: their connections to us were closed, and their port refuses a new one.

Owns the connections with which it asks, one a peer. A broken line closes connections too, so only
the refusal counts: the kernel of the peer's machine gives it when no process holds the port. Knows
no ZeroMQ.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

MAX_ASKED = 64
"""Peers asked at a time. A further one takes the place of who was asked first: who accepts and says
nothing has no other deadline, and silence tells of it later.
"""
NUM_TRIES = 3
"""The kernel may still take a connection for a process that ends, and closes it with all else: then
it is asked again.
"""


class EndedPeers:
    """Asks peers whether anybody listens. Its owner calls `look` when `ready` is."""

    def __init__(self, ready: select.epoll) -> None:
        """`ready` waits for the answers too."""
        self._ready = ready
        self._asked: dict[str, tuple[socket.socket, int]] = {}
        """Address -> the connection to it, and how many were made before."""
        self._refused: list[str] = []

    def ask(self, address: str, num_before: int = 0) -> None:
        """Begin to find out whether the process at "tcp://HOST:PORT#KEY" has ended. HOST is a
        number: names are not resolved here.
        """
        if address in self._asked:
            return
        if len(self._asked) >= MAX_ASKED:
            self._forget(next(iter(self._asked)))
        host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
        try:
            [(family, kind, _, _, place), *_] = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )  # fmt: skip
            link = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        except (OSError, ValueError):  # a host that cannot even be encoded, such as "a..b"
            return
        try:
            with contextlib.suppress(BlockingIOError):
                link.connect(place)
        except OSError as error:
            link.close()
            if isinstance(error, ConnectionRefusedError):
                self._refused.append(address)
            return
        self._asked[address] = link, num_before
        self._ready.register(link, select.EPOLLOUT)

    def look(self) -> Iterator[str]:
        """Yield the addresses where nobody listens any more."""
        for address, (link, num_before) in list(self._asked.items()):
            again = False
            try:
                self._wait_for_words(link)
            except BlockingIOError:
                continue
            except ConnectionRefusedError:
                self._refused.append(address)
            except OSError:
                again = num_before + 1 < NUM_TRIES
            self._forget(address)
            if again:
                self.ask(address, num_before + 1)
        while self._refused:
            yield self._refused.pop()

    def _wait_for_words(self, link: socket.socket) -> None:
        """Return once the peer has said something, as one that lives does at once.

        Raises:
            BlockingIOError: it has not answered yet.
            OSError: it refuses the connection, or has closed it.
        """
        if code := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, "refused, or closed")
        try:
            link.getpeername()
        except OSError as error:
            raise BlockingIOError from error  # not connected yet
        self._ready.modify(link, select.EPOLLIN | select.EPOLLRDHUP)
        if not link.recv(1):
            raise ConnectionResetError

    def close(self) -> None:
        """Ask nobody any more."""
        for address in list(self._asked):
            self._forget(address)

    def _forget(self, address: str) -> None:
        link, _ = self._asked.pop(address)
        self._ready.unregister(link)
        link.close()
