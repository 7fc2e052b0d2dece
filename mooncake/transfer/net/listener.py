"""Accepts the connections of peers, up to a limit, and keeps the sessions they open with us.

One listener serves each protocol's owner side, whatever its connections carry.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from mooncake.base.errors import ConfigError
from mooncake.transfer.net.endpoint import ListenAddress, PeerKey
from mooncake.transfer.net.handshake import PeerIdentity
from mooncake.transfer.net.io_loop import READABLE, IoLoop
from mooncake.transfer.net.standing import Standing, ended

_LOG = logging.getLogger(__name__)
_REST_S = 0.5
"""When descriptors run out, no connection is accepted for this long."""
_BACKLOG = 512
MAX_UNPROVEN = 128
"""Connections that have not proven themselves. When there are more, the oldest is closed. So a
flood of them takes no peer's place: a real peer proves itself within a few ms.
"""
MAX_PER_CLIENT = 256
"""Connections of all pool clients that share a credential. When there are more, the oldest is
closed.
"""


def tcp_listener(listen: ListenAddress) -> socket.socket:
    """Return a socket that listens on a free port of `listen`.

    Raises:
        ConfigError: the address cannot be bound, or none of the ports is free.
    """
    first, last = listen.ports or (0, 0)
    problem: OSError | None = None
    for port in range(first, last + 1):
        try:
            return _listening(listen.bind_host, port)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    among = f":{first}-{last}" if first else ""
    raise ConfigError(
        f"cannot listen on {listen.bind_host}{among} for transfers: {problem}"
    ) from problem


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # connections of its earlier owner may still be in TIME_WAIT
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def watch_host(sock: socket.socket, dead_host_s: float) -> None:
    """Have the kernel break a connection whose other host is silent for this long, even when
    nothing is being sent to it: a host without power does not close its connections.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_host_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(dead_host_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * dead_host_s))


def whence(sock: socket.socket) -> str | None:
    """Return the address of the other end, or None if it has gone, or it is on this host."""
    try:
        peer = sock.getpeername()
    except OSError:
        return None
    return str(peer[0]) if isinstance(peer, tuple) else None


class Session(Protocol):
    """One connection from a peer to us."""

    @property
    def loop(self) -> IoLoop:
        """The loop in which the session runs; it need not be the listener's."""

    @property
    def identity(self) -> PeerIdentity | None:
        """What the peer has proven; None before that."""

    def close(self) -> None:
        """Hang up; called in `loop`."""


SessionT = TypeVar("SessionT", bound=Session)


class Listener(Generic[SessionT]):
    """A listening socket and the sessions of those that connected to it. Owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        loop: IoLoop,
        name: str,
        limit: int,
        standing: Standing,
        open_session: Callable[[socket.socket], SessionT],
    ) -> None:
        """Accept in `loop`; `open_session` gets each connection, as a non-blocking socket. A
        session ends when its client is no longer valid by `standing`.
        """
        self._sock = sock
        self._loop = loop
        self._name = name
        self._limit = limit
        self._open_session = open_session
        self._lock = threading.Lock()
        self._sessions: dict[SessionT, None] = {}
        self._unproven: deque[SessionT] = deque()
        self._doubted: set[SessionT] = set()
        """Sessions to which the last look objected."""
        standing.watch(self)
        self._closed = False
        sock.setblocking(False)
        loop.post(self._watch)

    @property
    def num_sessions(self) -> int:
        """Number of sessions open now, proven or not."""
        return len(self._sessions)

    @property
    def sessions(self) -> list[SessionT]:
        """The sessions that are open now."""
        with self._lock:
            return list(self._sessions)

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
        if self.num_sessions >= self._limit:
            _LOG.warning(
                "%s peer %s refused: too many connections", self._name, address or "of this host"
            )
            sock.close()
            return
        sock.setblocking(False)
        self._hang_up_oldest()
        with self._lock:
            if self._closed:
                sock.close()
                return
            session = self._open_session(sock)
            self._sessions[session] = None
        self._unproven.append(session)

    def _hang_up_oldest(self) -> None:
        """Make room by closing the oldest sessions that have not proven themselves."""
        self._unproven = deque(
            each for each in self._unproven if each.identity is None and each in self._sessions
        )
        if len(self._unproven) >= MAX_UNPROVEN:
            _LOG.warning("%s peer closed: too many have not proven themselves", self._name)
            oldest = self._unproven.popleft()
            oldest.loop.post(oldest.close)

    def fenced(self, identity: PeerIdentity) -> list[SessionT]:
        """Return the earlier sessions of a client that its hello asks to end, if they were opened
        with the same keys: the ids travel in clear, so others may know them.
        """
        if not identity.fenced:
            return []
        key = identity.certificate.signing_key
        return [
            session
            for session in self.sessions
            if (earlier := session.identity) is not None
            and earlier.certificate.signing_key == key
            and earlier.engine_id == identity.engine_id
            and earlier.connection_id in identity.fenced
        ]

    def too_many_of(self, identity: PeerIdentity) -> list[SessionT]:
        """Return the oldest sessions by which a pool client's credential exceeds its limit."""
        if identity.borrower is None:
            return []
        own = [
            session
            for session in self.sessions
            if session.identity is not None and session.identity.borrower == identity.borrower
        ]
        return own[: max(0, len(own) - MAX_PER_CLIENT)]

    def look(self, standing: Standing) -> list[PeerKey]:
        """End the sessions of clients whose certificates failed two looks in a row; see
        `Standing`.
        """
        before, self._doubted = self._doubted, set()
        for session in self.sessions:
            identity = session.identity
            reason = None if identity is None else standing.objection(identity.certificate)
            if identity is None or reason is None:
                continue
            self._doubted.add(session)
            if session in before:
                ended(f"the {self._name} session", identity.engine_id, reason)
                session.loop.post(session.close)
        return []

    def owners(self) -> list[PeerKey]:
        """Return nothing: the clients prove themselves again, not the owner."""
        return []

    def forget(self, session: SessionT) -> None:
        """Drop a session that has ended."""
        with self._lock:
            self._sessions.pop(session, None)

    def refuse(self) -> list[SessionT]:
        """Accept no more connections; return the open sessions, for the caller to end."""
        with self._lock:
            self._closed = True
            return list(self._sessions)

    def close(self) -> list[SessionT]:
        """Close the socket too. Call it in the loop only."""
        sessions = self.refuse()
        self._loop.remove(self._sock.fileno())
        self._sock.close()
        return sessions
