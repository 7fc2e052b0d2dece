"""Takes in the connections of peers, up to a limit, whatever their protocol. Lives in one loop."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mooncake.base.errors import ConfigError
from mooncake.transfer.backends.io_loop import READABLE, IoLoop

_LOG = logging.getLogger(__name__)
_REST_S = 0.5
"""Out of descriptors, the queue of peers is left alone for so long."""
_BACKLOG = 512
MAX_STRANGERS = 128
"""Connections that have not proven themselves; of more, the oldest is hung up. A flood of strangers
takes no peer's place: proving oneself takes a few ms.
"""


def tcp_listener(host: str) -> socket.socket:
    """Return a socket that listens on a free port of `host`.

    Raises:
        ConfigError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} for transfers: {error}") from error
    return sock


def watch_host(sock: socket.socket, dead_host_s: float) -> None:
    """Have the kernel break a connection whose other host says nothing for so long, whether or not
    something is on its way to it: a host without power does not hang up.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_host_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(dead_host_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * dead_host_s))


class Guest(Protocol):
    """A connection that was taken in."""

    @property
    def is_stranger(self) -> bool:
        """It is still there and has not proven itself."""

    def close(self) -> None:
        """Hang up; called in the listener's loop."""


class Listener:
    """See the module. Owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        loop: IoLoop,
        name: str,
        limit: int,
        num_open: Callable[[], int],
        take: Callable[[socket.socket], Guest | None],
    ) -> None:
        """`take` is given each connection, not blocking; `num_open` is held against `limit`."""
        self._strangers: deque[Guest] = deque()
        self._sock = sock
        self._loop = loop
        self._name = name
        self._limit = limit
        self._num_open = num_open
        self._take = take
        self._closed = False
        sock.setblocking(False)
        loop.post(self._watch)

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add(self._sock.fileno(), READABLE, self._accept)

    def _accept(self, _events: int) -> None:
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _LOG.warning("cannot accept a %s peer: %s", self._name, error)
            self._loop.remove(self._sock.fileno())
            self._loop.call_later(_REST_S, self._watch)
            return
        if self._num_open() >= self._limit:
            _LOG.warning("%s peer %s refused: too many", self._name, address or "of this host")
            sock.close()
            return
        sock.setblocking(False)
        self._strangers = deque(guest for guest in self._strangers if guest.is_stranger)
        if len(self._strangers) >= MAX_STRANGERS:
            _LOG.warning("%s peer hung up on: too many have not proven themselves", self._name)
            self._strangers.popleft().close()
        guest = self._take(sock)
        if guest is not None:
            self._strangers.append(guest)

    def close(self) -> None:
        """Take no more connections; in the loop."""
        if not self._closed:
            self._closed = True
            self._loop.remove(self._sock.fileno())
            self._sock.close()
