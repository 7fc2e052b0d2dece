"""The owner's side of TCP: answers peers' READs and WRITEs straight from and to registered memory.

Each connection lives in one I/O loop. Who has not proven to know the cluster secret gets nothing;
every range is checked against our own table; a connection that its engine gave up (it hung up, or
fenced it in a later hello) applies no further byte.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base.errors import ProtocolError
from mooncake.transfer.backends import tcp_wire as wire
from mooncake.transfer.backends.io_loop import HUNG_UP, READABLE, WRITABLE, IoLoop, Timer
from mooncake.transfer.backends.listener import Listener, tcp_listener, watch_host
from mooncake.transfer.handshake import MAX_HANDSHAKE_BYTES, Credentials, PeerIdentity
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.regions import HostRegion, RangeRefused, RegionTable

_LOG = logging.getLogger(__name__)
_REQUESTS = frozenset((wire.WRITE, wire.READ))
_MAX_IOVECS = 1024
_HELPINGS = 64
"""Of payload taken in a row, before the loop's other connections get their turn."""
_LOCAL_SEND_BYTES = 1024 * 2**10


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds of the owner's side."""

    num_connections: int = 4096
    handshake_s: float = 5.0
    """A connection that has not proven itself by then is closed."""
    dead_host_s: float = 20.0
    """A host that does not answer the kernel's probes for this long is gone."""


class TcpServer:
    """Listens for peers. All its connections end with `close`."""

    def __init__(
        self,
        bind_host: str,
        credentials: Credentials,
        table: RegionTable,
        loops: Sequence[IoLoop],
        limits: ServerLimits,
    ) -> None:
        self.credentials = credentials
        self.table = table
        self.limits = limits
        self._loops = loops
        self._next_loop = itertools.cycle(loops)
        self._lock = threading.Lock()
        self._connections: set[ServerConnection] = set()
        self._closed = False
        self.stats = LinkStats("tcp_served")
        """What peers moved to and from our memory."""
        sock = tcp_listener(bind_host)
        self.port: int = sock.getsockname()[1]
        limit = limits.num_connections
        self._listener = Listener(
            sock, loops[0], "TCP", limit, lambda: self.num_connections, self._take
        )

    @property
    def num_connections(self) -> int:
        """Connections open now, proven or not."""
        return len(self._connections)

    def _take(self, sock: socket.socket) -> _Guest | None:
        with self._lock:
            if self._closed:
                sock.close()
                return None
            connection = ServerConnection(self, sock, next(self._next_loop))
            self._connections.add(connection)
        connection.loop.post(connection.start)
        return _Guest(connection)

    def fence(self, identity: PeerIdentity) -> None:
        """Return when the named earlier connections of this engine touch no memory any more."""
        if not identity.fenced:
            return
        with self._lock:
            stale = [
                connection
                for connection in self._connections
                if connection.identity is not None
                and connection.identity.engine_id == identity.engine_id
                and connection.identity.connection_id in identity.fenced
            ]
        for connection in stale:
            connection.fence()

    def forget(self, connection: ServerConnection) -> None:
        """A connection has closed."""
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        """Stop listening and close all connections (they go when their loops next turn)."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        self._loops[0].post(self._listener.close)
        for connection in connections:
            connection.loop.post(connection.close)


class ServerConnection:
    """One peer's stream, served request by request. Lives in `loop`."""

    def __init__(self, server: TcpServer, sock: socket.socket, loop: IoLoop) -> None:
        self.loop = loop
        self.identity: PeerIdentity | None = None
        self._server = server
        self._sock = sock
        self._handshake = server.credentials.accept()
        self._timer: Timer | None = None
        self._fenced = False
        self._closed = False
        self._events = READABLE
        self._poller = select.poll()
        self._poller.register(sock, READABLE | select.POLLRDHUP)
        self._want = memoryview(bytearray(wire.LENGTH_BYTES))
        self._num_filled = 0
        self._then: Callable[[memoryview], None] = self._on_handshake_length
        self._has_head = False
        self._request: wire.Header | None = None
        self._began_s = 0.0
        self._nic = sock.getsockname()[0]
        self._refusal: str | None = None
        self._regions: list[HostRegion] = []
        self._incoming: list[memoryview] = []
        self._num_incoming = 0
        self._outgoing: list[memoryview] = []
        self._is_ahead = False

    def start(self) -> None:
        """Begin to listen to the peer."""
        if self._closed:
            return
        tune_socket(self._sock, self._server.limits.dead_host_s)
        tune_connected(self._sock)
        self.loop.add(self._sock.fileno(), READABLE, self._on_event)
        self._timer = self.loop.call_later(self._server.limits.handshake_s, self._on_silence)

    def _on_silence(self) -> None:
        _LOG.warning("transfer connection closed: no handshake in time")
        self.close()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def fence(self) -> None:
        """Apply no further byte; from any thread. On return none is being applied."""
        self._fenced = True
        with self.loop.gate:
            pass
        self.loop.post(self.close)

    def close(self) -> None:
        """Hang up."""
        if not self._closed:
            self._closed = True
            self._forget_timer()
            self.loop.remove(self._sock.fileno())
            self._sock.close()
            self._incoming = []
            self._outgoing = []
            self._regions = []
            self._server.forget(self)

    @property
    def is_stranger(self) -> bool:
        """It is still there and has not proven itself."""
        return self.identity is None and not self._closed

    def _on_event(self, events: int) -> None:
        try:
            if events & HUNG_UP:
                self.close()
                return
            if self._outgoing:
                self._flush()
                return
            if not self._num_incoming:
                self._receive_head()
            for _ in range(_HELPINGS):
                if not (self._num_incoming and self._receive_payload()):
                    return
                # A peer that hung up has given up: what it left in the socket must not be applied.
                # So there is one helping of payload for each look at the socket, and no more.
                events = self._look()
                if events & HUNG_UP:
                    self.close()
                if events != READABLE:
                    return
        except (OSError, ProtocolError, RangeRefused) as error:
            if self.identity is not None and not isinstance(error, ConnectionError):
                _LOG.warning("transfer from %s ended: %s", self.identity.engine_id, error)
            self.close()

    def _look(self) -> int:
        """Return what the loop would be told of this socket now."""
        found = self._poller.poll(0)
        return found[0][1] if found else 0

    def _expect(self, num_bytes: int, then: Callable[[memoryview], None]) -> None:
        if len(self._want) != num_bytes:
            self._want = memoryview(bytearray(num_bytes))
        self._num_filled = 0
        self._then = then

    def _receive_head(self) -> None:
        """Take what there is of a handshake message, or of a request's header and ranges."""
        self._has_head = False
        while not (self._closed or self._has_head):
            try:
                count = self._sock.recv_into(self._want[self._num_filled :])
            except BlockingIOError:
                return
            if count == 0:
                self.close()
                return
            self._num_filled += count
            if self._num_filled == len(self._want):
                self._then(self._want)

    # ------------------------------------------------------------- handshake

    def _on_handshake_length(self, data: memoryview) -> None:
        length = int.from_bytes(data, "little")
        if not 0 < length <= MAX_HANDSHAKE_BYTES:
            _LOG.warning("transfer connection refused: it does not speak this protocol")
            self.close()
            return
        self._expect(length, self._on_handshake)

    def _on_handshake(self, data: memoryview) -> None:
        answer = self._handshake.step(data)
        if self._handshake.refusal is not None:
            _LOG.warning("transfer connection refused: %s", self._handshake.refusal)
            self._sock.send(wire.pack_handshake(answer))
            self.close()
            return
        identity = self._handshake.identity
        if identity is None:
            self._expect(wire.LENGTH_BYTES, self._on_handshake_length)
        else:
            self._server.fence(identity)
            self.identity = identity
            self._forget_timer()
            self._expect(wire.HEAD_BYTES, self._on_header)
        self._has_head = True
        self._reply([memoryview(wire.pack_handshake(answer))])

    # -------------------------------------------------------------- requests

    def _on_header(self, data: memoryview) -> None:
        request = self._request = wire.parse_header(data[: wire.HEADER_BYTES], _REQUESTS)
        if request.num_ranges == 0:
            raise ProtocolError("transfer request without ranges")
        if request.num_ranges == 1:
            self._on_head(request, data)
        else:  # what has come of the ranges already stays at their front
            begun = data[wire.HEADER_BYTES :]
            self._expect(request.num_ranges * wire.RANGE_BYTES, self._on_ranges)
            self._want[: len(begun)] = begun
            self._num_filled = len(begun)

    def _on_ranges(self, data: memoryview) -> None:
        assert self._request is not None
        self._on_head(self._request, data)

    def _on_head(self, request: wire.Header, data: memoryview) -> None:
        """A request is known in full: resolve it against our table."""
        self._has_head = True
        self._began_s = time.monotonic()
        ranges = wire.parse_ranges(data[-request.num_ranges * wire.RANGE_BYTES :])
        lengths = [length for _, _, length in ranges]
        if sum(lengths) != request.num_bytes or 0 in lengths:
            raise ProtocolError("transfer request whose ranges do not add up")
        views: list[memoryview] = []
        regions: list[HostRegion] = []
        self._refusal = None
        try:
            for region_id, offset, length in ranges:
                region = self._server.table.find(region_id, offset, length)
                if not regions or regions[-1] is not region:
                    regions.append(region)
                views.append(region.buffer[offset : offset + length])
        except RangeRefused as error:
            self._refusal = error.message
        self._regions = regions
        if request.kind == wire.WRITE:
            self._incoming = views
            self._num_incoming = request.num_bytes
        elif self._refusal is not None:
            self._end_request(wire.pack_refusal(request.request_id, self._refusal))
        else:
            header = wire.Header(wire.DATA, 0, request.request_id, request.num_bytes)
            self._end_request(wire.pack_header(header), views)

    def _receive_payload(self) -> bool:
        """Take one helping of a WRITE's payload into our memory, or past it when refused; return
        whether there was one and more is due.
        """
        with self.loop.gate:
            if self._fenced:
                return False
            if self._refusal is None:
                self._refusal = withdrawn(self._regions)
            try:
                if self._refusal is not None:
                    room = min(self._num_incoming, len(self.loop.scratch))
                    count = self._sock.recv_into(self.loop.scratch[:room])
                else:
                    count = receive_into(self._sock, self._incoming)
            except BlockingIOError:
                return False
        if count == 0:
            self.close()
            return False
        self._num_incoming -= count
        if self._num_incoming:
            if self._refusal is None:
                wire.advance(self._incoming, count)
            return True
        assert self._request is not None
        request_id = self._request.request_id
        if self._refusal is None:
            self._end_request(wire.pack_header(wire.Header(wire.DONE, 0, request_id, 0)))
            self._count()
        else:
            self._end_request(wire.pack_refusal(request_id, self._refusal))
        return False

    def _count(self) -> None:
        """The request in hand has been served."""
        if self.identity is not None and self._request is not None:
            self._server.stats.arrived(
                self._nic,
                self.identity.engine_id,
                self._request.num_bytes,
                self._began_s,
                time.monotonic(),
            )

    def _end_request(self, answer: bytes, payload: Sequence[memoryview] = ()) -> None:
        self._incoming = []
        if not payload:
            self._regions = []
        self._expect(wire.HEAD_BYTES, self._on_header)
        self._reply([memoryview(answer), *payload])

    def _reply(self, views: list[memoryview]) -> None:
        self._outgoing = views
        self._is_ahead = len(views) > 1 and wire.is_long(sum(map(len, views)))
        self._flush()

    def _flush(self) -> None:
        """Send what is due; while some is left nothing more is read."""
        while self._outgoing:
            with self.loop.gate:
                gone = withdrawn(self._regions)
                if gone is not None:
                    raise RangeRefused(gone)  # in mid-answer: the peer asks again and is refused
                views = self._outgoing[:_MAX_IOVECS]
                if self._is_ahead:
                    views = wire.ahead(views)
                try:
                    count = self._sock.sendmsg(views)
                except BlockingIOError:
                    self._watch(WRITABLE)
                    return
            wire.advance(self._outgoing, count)
            if self._is_ahead:
                self._is_ahead = False
                os.sched_yield()
        if self._regions:  # an answer to a READ has gone
            self._count()
        self._regions = []
        self._watch(READABLE)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            self.loop.modify(self._sock.fileno(), events)


@dataclass(frozen=True)
class _Guest:
    """A connection as the listener knows it, whose loop may be another."""

    connection: ServerConnection

    @property
    def is_stranger(self) -> bool:
        return self.connection.is_stranger

    def close(self) -> None:
        self.connection.loop.post(self.connection.close)


def withdrawn(regions: Sequence[HostRegion]) -> str | None:
    """Return why one of `regions` may not be touched any more, or None."""
    for region in regions:
        if not region.alive:
            return f"region {region.region_id} ({region.label}) was unregistered"
    return None


def receive_into(sock: socket.socket, views: list[memoryview]) -> int:
    """Receive into scattered memory; return the number of bytes, 0 at the end of the stream."""
    if len(views) == 1:
        return sock.recv_into(views[0])
    return sock.recvmsg_into(views[:_MAX_IOVECS])[0]


def tune_socket(sock: socket.socket, dead_host_s: float) -> None:
    """Set what both ends of a transfer connection need."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_host(sock, dead_host_s)


def tune_connected(sock: socket.socket) -> None:
    """Between two sockets of one host there is no path to probe and none to share: no pacing, and
    no more in flight than stays in the caches (4 MiB took 590 us instead of 730).
    """
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
