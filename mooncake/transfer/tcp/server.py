"""The owner's side of TCP: it answers peers' READs and WRITEs straight from and to registered
memory, and sends what the answers to their questions name.

Each connection lives in one I/O loop. A client gets nothing before it has proven its credential.
Every range and grant is checked against our own table, and a grant again before each piece of a
payload lands. Once a client has given a connection up (it closed it, or fenced it in a later
hello), no further byte is applied.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base.errors import ProtocolError
from mooncake.base.rights import Sender
from mooncake.transfer.engine import MAX_ANSWER_PIECES, Pieces
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import (
    WORKERS_AND_CLIENTS,
    Channel,
    Credentials,
    PeerIdentity,
)
from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, WRITABLE, IoLoop
from mooncake.transfer.net.listener import Listener, tcp_listener, watch_host, whence
from mooncake.transfer.net.session import OwnerStream, Welcome
from mooncake.transfer.regions import RangeRefused, RegionTable, Withdrawable, withdrawn
from mooncake.transfer.tcp import wire
from mooncake.transfer.tcp.frames import Incoming, Outgoing
from mooncake.transfer.tcp.questions import Questions

_LOG = logging.getLogger(__name__)
_REQUESTS = frozenset((wire.WRITE, wire.READ, wire.ASK))
_READS_IN_A_ROW = 64
"""Reads of payload in a row, before the loop's other connections get their turn."""
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
    """Serves the connections of clients. `close` ends all of them."""

    def __init__(
        self,
        listen: ListenAddress,
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
        self.stats = LinkStats("tcp_served")
        """What clients moved to and from our memory."""
        self.questions = Questions()
        sock = tcp_listener(listen)
        self.port: int = sock.getsockname()[1]
        self.listener = Listener(
            sock, loops[0], "TCP", limits.num_connections, credentials.standing, self._take
        )

    @property
    def num_connections(self) -> int:
        """Number of connections open now, proven or not."""
        return self.listener.num_sessions

    def _take(self, sock: socket.socket) -> ServerConnection:
        connection = ServerConnection(self, sock, next(self._next_loop))
        connection.loop.post(connection.start)
        return connection

    def close(self) -> None:
        """Stop listening and close all connections (they end when their loops turn next)."""
        connections = self.listener.refuse()
        self._loops[0].post(self._close_listener)
        for connection in connections:
            connection.loop.post(connection.close)

    def _close_listener(self) -> None:
        self.listener.close()


class ServerConnection:
    """One client's connection, served request by request. Lives in `loop`."""

    def __init__(self, server: TcpServer, sock: socket.socket, loop: IoLoop) -> None:
        self.loop = loop
        self.identity: PeerIdentity | None = None
        self._server = server
        self._sock = sock
        self._stream: OwnerStream | None = None
        """The socket in frames of the handshake, until the client has proven itself."""
        self._channel: Channel | None = None
        self._fenced = False
        self._closed = False
        self._events = READABLE
        self._poller = select.poll()
        self._poller.register(sock, READABLE | select.POLLRDHUP)
        self._want = memoryview(b"")
        self._num_filled = 0
        self._then: Callable[[memoryview], None] = self._on_header
        self._has_head = False
        self._request: wire.Header | None = None
        self._began_s = 0.0
        self._nic = sock.getsockname()[0]
        self._whence = whence(sock)
        self._refusal: str | None = None
        self._needed: list[Withdrawable] = []
        """The regions that the request in hand touches, its grant, and a pool client's loans."""
        self._incoming: Incoming | None = None
        self._outgoing: Outgoing | None = None
        self._question = 0
        """The number of the question in hand; 0: none."""

    def start(self) -> None:
        """Begin to listen to the client."""
        if self._closed:
            return
        tune_connected(self._sock)
        self._stream = OwnerStream(
            "TCP", self.loop, self._sock, self._server.credentials.accept(WORKERS_AND_CLIENTS),
            self, self._server.limits.handshake_s,
        )  # fmt: skip

    def on_proven(self, identity: PeerIdentity, welcome: Welcome) -> None:
        """Let a client in: from now on the socket carries requests."""
        assert self._stream is not None
        for stale in self._server.listener.fenced(identity):
            stale.fence()
        self.identity = identity
        for oldest in self._server.listener.too_many_of(identity):
            oldest.fence()
        welcome(())
        self._channel = self._stream.hand_over()
        self._stream = None
        tune_socket(self._sock, self._server.limits.dead_host_s)
        self.loop.add(self._sock.fileno(), READABLE, self._on_event)
        self._expect_head()

    def on_frame(self, body: bytes) -> None:
        """Refuse a frame: after the handshake there are requests."""
        del body
        raise ProtocolError("the handshake is over")

    def fence(self) -> None:
        """Apply no further byte. No byte is being applied when this returns. Any thread may call
        this.
        """
        self._fenced = True
        with self.loop.gate:
            pass
        self.loop.post(self.close)

    def close(self) -> None:
        """Close the connection."""
        if not self._closed:
            self._closed = True
            if self._stream is not None:
                self._stream.close()
            else:
                self.loop.remove(self._sock.fileno())
                self._sock.close()
            self._incoming = None
            self._outgoing = None
            self._needed = []
            self._end_question()
            self._server.questions.left(self)
            self._server.listener.forget(self)

    def _on_event(self, events: int) -> None:
        try:
            if events & HUNG_UP:
                self.close()
                return
            if self._outgoing is not None:
                self._flush(self._outgoing)
                return
            if self._question:  # nothing is read before it is answered
                self._watch(0)
                return
            if self._incoming is None:
                self._receive_head()
            for _ in range(_READS_IN_A_ROW):
                if self._incoming is None or not self._receive_payload(self._incoming):
                    return
                # A peer that hung up has given up: what it left in the socket must not be applied.
                # So there is one read of payload for each look at the socket, and no more.
                events = self._look()
                if events & HUNG_UP:
                    self.close()
                if events != READABLE:
                    return
        except (OSError, ProtocolError, RangeRefused) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.identity is not None and not isinstance(error, ConnectionError):
            _LOG.warning("transfer from %s ended: %s", self.identity.engine_id, error)
        self.close()

    def _look(self) -> int:
        """Return the events that this socket has now."""
        found = self._poller.poll(0)
        return found[0][1] if found else 0

    def _expect(self, num_bytes: int, then: Callable[[memoryview], None]) -> None:
        if len(self._want) != num_bytes:
            self._want = memoryview(bytearray(num_bytes))
        self._num_filled = 0
        self._then = then

    def _receive_head(self) -> None:
        """Read what is available of a request's header and ranges."""
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

    # -------------------------------------------------------------- requests

    def _expect_head(self) -> None:
        assert self._channel is not None
        self._expect(wire.HEAD_BYTES + self._channel.received.num_tag_bytes, self._on_header)

    def _on_header(self, data: memoryview) -> None:
        request = self._request = wire.parse_header(data[: wire.HEADER_BYTES], _REQUESTS)
        is_question = request.kind == wire.ASK
        if is_question != (request.num_ranges == 0):
            raise ProtocolError("a transfer request has no ranges, or a question has some")
        then = self._on_question if is_question else self._on_head
        length = request.num_bytes if is_question else request.num_ranges * wire.RANGE_BYTES
        if length == wire.RANGE_BYTES:
            then(request, data)
        else:
            more = length - wire.RANGE_BYTES
            self._expect(len(data) + more, functools.partial(then, request))
            self._want[: len(data)] = data
            self._num_filled = len(data)

    def _on_head(self, request: wire.Header, data: memoryview) -> None:
        """Resolve a request, now completely known, against our table."""
        assert self._channel is not None
        head = memoryview(self._channel.received.open(data))
        self._has_head = True
        self._began_s = time.monotonic()
        ranges = wire.parse_ranges(head[wire.HEADER_BYTES :])
        lengths = [length for _, _, length in ranges]
        if sum(lengths) != request.num_bytes or 0 in lengths:
            raise ProtocolError("the ranges of a transfer request do not add up to its bytes")
        views = self._resolve(request, ranges)
        if request.kind == wire.WRITE:
            self._incoming = Incoming(views, lengths, self._channel.received)
        elif self._refusal is not None:
            self._refuse(request, self._refusal)
        else:
            header = wire.Header(wire.DATA, 0, request.request_id, request.num_bytes)
            self._end_request(wire.pack_header(header), payload=views)

    def _resolve(
        self, request: wire.Header, ranges: Sequence[tuple[int, int, int]]
    ) -> list[memoryview]:
        """Return the memory of ranges, and note what the request needs, or why it is refused."""
        views: list[memoryview] = []
        needed: list[Withdrawable] = []
        self._refusal = None
        try:
            borrower = self.identity.borrower if self.identity is not None else ""
            if borrower is not None:
                is_write = request.kind == wire.WRITE
                needed += self._server.table.borrowed(borrower, ranges, write=is_write)
            views, regions = self._server.table.views(ranges)
            needed += regions
            if request.kind == wire.WRITE:
                needed += self._server.table.permits(regions, request.grant)
        except RangeRefused as error:
            self._refusal = error.message
        self._needed = needed
        return views

    # ------------------------------------------------------------- questions

    def _on_question(self, request: wire.Header, data: memoryview) -> None:
        """Have a question, now completely known, answered."""
        assert self._channel is not None
        assert self.identity is not None
        head = self._channel.received.open(data, wire.HEADER_BYTES)
        self._has_head = True
        self._began_s = time.monotonic()
        question = bytes(head[wire.HEADER_BYTES :])
        self._question = self._server.questions.open(
            self, question, request.grant, self._sender, self._whence or ""
        )
        if not self._question:
            self._refuse(request, "questions are not heard here")

    @functools.cached_property
    def _sender(self) -> Sender:
        assert self.identity is not None
        return self.identity.certificate.sender()

    def answer(self, number: int, answer: bytes, region_id: int, pieces: Pieces) -> None:
        """Send the answer to the question in hand, and the pieces of memory behind it."""
        request = self._request
        if number != self._question or request is None:
            return
        try:
            ranges = _cut(region_id, pieces, request.grant)
            views = self._resolve(request, ranges)
            if self._refusal is not None:
                self._refuse(request, self._refusal)
                return
            num_bytes = pieces.num_bytes * len(pieces.offsets)
            header = wire.Header(wire.TOLD, 0, request.request_id, num_bytes, len(answer))
            self._request = header
            self._end_request(wire.pack_header(header), b"", payload=views, answer=answer)
        except (OSError, ProtocolError, RangeRefused) as error:
            self._fail(error)

    def refuse(self, number: int, reason: str) -> None:
        """Refuse the question in hand."""
        if number == self._question and self._request is not None:
            try:
                self._refuse(self._request, reason)
            except OSError as error:
                self._fail(error)

    def _end_question(self) -> None:
        if self._question:
            number, self._question = self._question, 0
            self._server.questions.end(number)

    # -------------------------------------------------------------- payloads

    def _receive_payload(self, payload: Incoming) -> bool:
        """Read some of a WRITE's payload into our memory, or drop it when the WRITE is refused.

        Return whether bytes came and more are due.
        """
        with self.loop.gate:
            if self._fenced:
                return False
            if self._refusal is None:
                self._refusal = withdrawn(self._needed)
            try:
                if self._refusal is not None:
                    count = payload.drop(self._sock, self.loop.scratch)
                else:
                    count = payload.receive(self._sock)
            except BlockingIOError:
                return False
        if count == 0:
            self.close()
            return False
        if payload.num_left:
            return True
        request = self._request
        assert request is not None
        if self._refusal is None:
            self._end_request(wire.pack_header(wire.Header(wire.DONE, 0, request.request_id, 0)))
            self._count()
        else:
            self._refuse(request, self._refusal)
        return False

    def _refuse(self, request: wire.Header, reason: str) -> None:
        self._needed = []
        header, text = wire.pack_refusal(request.request_id, reason)
        self._end_request(header, b"", answer=text)

    def _count(self) -> None:
        """Count the current request, which has been served."""
        if self.identity is not None and self._request is not None:
            self._server.stats.arrived(
                self._nic,
                self.identity.engine_id,
                self._request.num_bytes,
                self._began_s,
                time.monotonic(),
            )

    def _end_request(
        self, *messages: bytes, payload: Sequence[memoryview] = (), answer: bytes = b""
    ) -> None:
        self._incoming = None
        if not payload:
            self._needed = []
        self._expect_head()
        assert self._channel is not None
        self._reply(Outgoing(messages, payload, self._channel.sent, answer))

    def _reply(self, frame: Outgoing) -> None:
        self._outgoing = frame
        self._flush(frame)

    def _flush(self, frame: Outgoing) -> None:
        """Send what is due. Nothing more is read while some is left."""
        while not frame.is_sent:
            with self.loop.gate:
                gone = withdrawn(self._needed)
                if gone is not None:
                    raise RangeRefused(gone)  # in mid-answer: the peer asks again and is refused
                try:
                    count = self._sock.sendmsg(frame.views())
                except BlockingIOError:
                    self._watch(WRITABLE)
                    return
            frame.advance(count)
            if frame.is_ahead:
                frame.is_ahead = False
                os.sched_yield()
        self._outgoing = None
        if self._needed:  # an answer with a payload has gone
            self._count()
        self._needed = []
        self._end_question()
        self._watch(READABLE)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            self.loop.modify(self._sock.fileno(), events)


def _cut(region_id: int, pieces: Pieces, num_bytes: int) -> list[tuple[int, int, int]]:
    """Return the ranges of pieces of memory, cut into shorter ones of `num_bytes` each. Raises
    ProtocolError when they cannot be cut so, or are too many.
    """
    if not pieces.offsets:
        return []
    count, rest = divmod(pieces.num_bytes, num_bytes) if num_bytes else (0, 1)
    if rest or count * len(pieces.offsets) > MAX_ANSWER_PIECES:
        raise ProtocolError(
            f"a question asks for pieces of {num_bytes} bytes, into which these cannot be cut"
        )
    starts = range(0, pieces.num_bytes, num_bytes)
    return [(region_id, offset + start, num_bytes) for offset in pieces.offsets for start in starts]


def tune_socket(sock: socket.socket, dead_host_s: float) -> None:
    """Set the options that both ends of a transfer connection need."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_host(sock, dead_host_s)


def tune_connected(sock: socket.socket) -> None:
    """Turn pacing off between two sockets of one host, where there is no path to probe or share.
    Keep no more in flight than the caches hold (4 MiB took 590 us instead of 730).
    """
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
