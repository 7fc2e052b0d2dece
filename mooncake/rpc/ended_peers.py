"""Finds out which peers have ended: their connections to us were closed, and their port refuses a
new one.

Owns the connections with which it asks, one for each peer. A broken line closes connections too, so
only the refusal counts: the kernel of the peer's machine refuses when no process holds the port.
This module does not know ZeroMQ.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

MAX_ASKED = 64
"""Peers that are asked at a time. A further one takes the place of the one asked first. A peer that
accepts the connection and says nothing has no other deadline here; its silence is noticed later,
elsewhere.
"""
NUM_TRIES = 3
"""The kernel may still accept a connection for a process that is ending, and close it a moment
later. Such a peer is asked again.
"""


class EndedPeers:
    """Asks peers whether any process listens. Its owner calls `look` when `ready` is readable."""

    def __init__(self, ready: select.epoll) -> None:
        """Add the sockets that wait for answers to `ready`."""
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
        """Yield the addresses where no process listens any more."""
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
        """Return once the peer has sent something; a peer that lives sends something at once.

        Raises:
            BlockingIOError: it has not answered yet.
            OSError: it refuses the connection, or has closed it.
        """
        if code := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, "the peer refused the connection or closed it")
        try:
            link.getpeername()
        except OSError as error:
            raise BlockingIOError from error  # not connected yet
        self._ready.modify(link, select.EPOLLIN | select.EPOLLRDHUP)
        if not link.recv(1):
            raise ConnectionResetError

    def close(self) -> None:
        """Stop asking, and close all connections."""
        for address in list(self._asked):
            self._forget(address)

    def _forget(self, address: str) -> None:
        link, _ = self._asked.pop(address)
        self._ready.unregister(link)
        link.close()
