"""One connection to one peer, from the client's side: it connects when needed, and carries slices.

A connection lives in one I/O loop and asks its `TcpPeer` for work. Only `try_send` may be called
from another thread, so all entries take its lock. When the connection breaks it hands its slices
back; it does not decide what becomes of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.batches import Job, Part
from mooncake.transfer.engine import Op
from mooncake.transfer.net.control_link import ControlLink, begin_to_connect
from mooncake.transfer.net.handshake import Channel, ConnectingSide
from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, WRITABLE, IoLoop, Timer
from mooncake.transfer.regions import HostRegion, RangeRefused, RegionTable, withdrawn
from mooncake.transfer.tcp import wire
from mooncake.transfer.tcp.frames import Incoming, Outgoing
from mooncake.transfer.tcp.server import tune_connected, tune_socket

if TYPE_CHECKING:
    from mooncake.transfer.tcp.backend import TcpPeer

_ANSWERS = frozenset((wire.DONE, wire.DATA, wire.REFUSED, wire.TOLD))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection."""

    num_requests: int = 16
    """Requests sent and not yet answered."""
    window_bytes: int = 8 * 2**20
    """Bytes of these requests; one request is always allowed. That is two slices: more would leave
    nothing to the other connections of a batch that is not very large.
    """
    connect_s: float = 5.0
    """Time to connect and shake hands."""
    stall_s: float = 30.0
    """A connection with work on it but no progress for this long counts as broken."""
    idle_s: float = 60.0
    """A connection without work for this long is closed."""


class Request(msgspec.Struct, eq=False):
    """A slice on a connection that was sent, or is being sent, and is not answered yet."""

    request_id: int
    part: Part
    regions: list[HostRegion]
    views: list[memoryview]
    """READ: where the answer goes."""
    outgoing: Outgoing
    posted_s: float
    given_up: bool = False
    """True if its job has ended, so that what still comes is dropped."""

    @property
    def answer_kind(self) -> int:
        """The kind of the answer, unless it is refused."""
        if self.part.job.question:
            return wire.TOLD
        return wire.DATA if self.part.job.op is Op.READ else wire.DONE


class ConnectionState(Enum):
    """The state of a connection."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """The end of a connection that was not closed on purpose."""

    reason: str
    parts: list[Part]
    """The parts that it had in hand."""
    connection_id: str | None
    """The connection's id; None if it never was ready."""


class Connection:
    """One of a peer's connections: idle, connecting or ready."""

    def __init__(
        self,
        owner: TcpPeer,
        address: tuple[str, int],
        table: RegionTable,
        loop: IoLoop,
        limits: ConnectionLimits,
    ) -> None:
        self.loop = loop
        self.state = ConnectionState.IDLE
        self.nic = "?"
        """Our address at this end, when it was last connected."""
        self._lock = threading.RLock()
        self._owner = owner
        self._address = address
        self._table = table
        self._limits = limits
        self._sock: socket.socket | None = None
        self._events = 0
        self._taken_over = False
        """True if a caller's thread, which has the lock, uses the socket instead of the loop."""
        self._handshake: ConnectingSide | None = None
        self._link: ControlLink | None = None
        """The socket in frames of the handshake, until the peer lets us in."""
        self._channel: Channel | None = None
        self._connection_id = ""
        self._timer: Timer | None = None
        self._requests: deque[Request] = deque()
        self._unsent: deque[Request] = deque()
        self._num_bytes = 0
        self._next_id = 1
        self._progress_s = 0.0
        self._want = memoryview(b"")
        self._num_filled = 0
        self._then: Callable[[memoryview], None] = self._on_header
        self._receiving: Incoming | None = None
        """The answer to the first request, when it has begun to come."""

    # ------------------------------------------------------------ connecting

    def wake(self) -> None:
        """Connect, or take some work, if there is any."""
        with self._lock:
            if self.state is ConnectionState.IDLE:
                self.connect()
            elif self.state is ConnectionState.READY:
                try:
                    self._pump()
                except (OSError, RangeRefused) as error:
                    self.abort(str(error))

    def try_send(self, *, is_write: bool) -> bool:
        """Send work in the caller's thread, which saves waking the loop. Return False if the
        connection is busy. `is_write`: there are many bytes to send.
        """
        if self.state is not ConnectionState.READY or not self._lock.acquire(blocking=False):
            return False
        try:
            sock = self._sock
            if sock is None or self.state is not ConnectionState.READY or self._requests:
                return False
            if is_write:  # the answer may come before all is sent: the loop need not wake for it
                self._taken_over = True
                self.loop.modify(sock.fileno(), 0)
            try:
                self._pump()
                if is_write and self._requests:
                    self._receive(sock)
            except (OSError, ProtocolError, RangeRefused) as error:
                self.loop.post(functools.partial(self._abort_if, sock, str(error)))
            finally:
                if self._taken_over:
                    self._taken_over = False
                    if self._sock is sock:
                        self.loop.modify(sock.fileno(), self._events)
            return True
        finally:
            self._lock.release()

    def _abort_if(self, sock: socket.socket, reason: str) -> None:
        if self._sock is sock:  # otherwise the loop has noticed by itself
            self.abort(reason)

    def connect(self) -> None:
        """Begin to connect. Call it only when idle."""
        self.state = ConnectionState.CONNECTING
        self._handshake = self._owner.new_handshake()
        try:
            sock = begin_to_connect(self._address)
        except OSError as error:
            self.abort(f"cannot connect: {error}")
            return
        self._link = ControlLink(self.loop, sock, self._on_handshake, self._on_no_connection)
        self._timer = self.loop.call_later(
            self._limits.connect_s, lambda: self.abort("the peer does not answer")
        )
        self._link.send(self._handshake.first_message)

    def _on_no_connection(self, reason: str) -> None:
        self.abort(f"cannot connect: {reason}")

    def _on_handshake(self, body: bytes) -> None:
        with self._lock:
            assert self._handshake is not None
            assert self._link is not None
            answer = self._handshake.step(body)
            if answer is not None:
                self._link.send(answer)
                return
            sock = self._sock = self._link.hand_over()
            hello, self._channel = self._handshake.hello, self._handshake.channel
            self._handshake = self._link = None
            tune_socket(sock, self._limits.stall_s)
            tune_connected(sock)
            self.nic = sock.getsockname()[0]
            self._events = READABLE
            self.loop.add(sock.fileno(), READABLE, self._on_event)
            self._connection_id = hello.connection_id
            self.state = ConnectionState.READY
            self._expect_header()
            self._progress_s = time.monotonic()
            self._restart_timer()
            self._owner.ready(hello.fenced)
            self.wake()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        often_s = min(1.0, self._limits.stall_s / 2, self._limits.idle_s / 2)
        self._timer = self.loop.call_later(often_s, self._look_after)

    def _look_after(self) -> None:
        with self._lock:
            quiet_s = time.monotonic() - self._progress_s
            if self._requests and quiet_s > self._limits.stall_s:
                self.abort(f"no progress for {quiet_s:.0f} s")
            elif not self._requests and quiet_s > self._limits.idle_s:
                self._hang_up()
            else:
                self._restart_timer()

    # ---------------------------------------------------------------- ending

    def abort(self, reason: str) -> None:
        """Reset the connection: the peer never applies what it has not applied yet."""
        with self._lock:
            if self.state is ConnectionState.IDLE:
                return
            was_ready = self.state is ConnectionState.READY
            parts = [request.part for request in self._requests if not request.given_up]
            connection_id = self._connection_id if was_ready else None
            self._hang_up(reset=True)
            self._owner.broken(self, ConnectionFailure(reason, parts, connection_id))

    def _hang_up(self, *, reset: bool = False) -> None:
        self.state = ConnectionState.IDLE
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._sock is not None:
            self.loop.remove(self._sock.fileno())
            if reset:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._sock.close()
            self._sock = None
        self._requests.clear()
        self._unsent.clear()
        self._num_bytes = 0
        self._receiving = None
        self._handshake = None

    def give_up(self, job: Job) -> bool:
        """Drop the READs of a stopped job; return whether WRITEs of it are still under way."""
        writes = False
        with self._lock:
            for request in self._requests:
                if request.part.job is not job or request.given_up:
                    continue
                if request.part.job.op is Op.READ:
                    request.given_up = True
                    job.give_back()
                else:
                    writes = True
        return writes

    # --------------------------------------------------------------- sending

    def _pump(self) -> None:
        limits = self._limits
        # Take none while one waits to be sent: another connection may be faster.
        while (
            not self._unsent
            and len(self._requests) < limits.num_requests
            and (not self._requests or self._num_bytes < limits.window_bytes)
        ):
            part = self._owner.take()
            if part is None:
                return
            self._queue(part)
            self._flush()

    def _queue(self, part: Part) -> None:
        try:
            views, regions = self._table.views(
                [(op.local_region, op.local_offset, op.num_bytes) for op in part.slice.pieces]
            )
        except RangeRefused as error:
            part.job.finish(error.message)
            return
        is_read = part.job.op is Op.READ
        num_bytes = part.slice.num_bytes
        kind = wire.READ if is_read else wire.WRITE
        pieces, question = part.slice.pieces, part.job.question
        if question:
            head = wire.pack_ask(self._next_id, len(question), part.slice.piece_bytes)
        else:
            head = wire.pack_request(kind, self._next_id, pieces, num_bytes, part.job.grant)
        assert self._channel is not None
        request = Request(
            request_id=self._next_id,
            part=part,
            regions=regions,
            views=views if is_read else [],
            outgoing=Outgoing([head], [] if is_read else views, self._channel.sent, question),
            posted_s=time.monotonic(),
        )
        if not self._requests:
            self._progress_s = request.posted_s
        self._next_id += 1
        self._num_bytes += num_bytes
        self._requests.append(request)
        self._unsent.append(request)

    def _flush(self) -> None:
        assert self._sock is not None
        while self._unsent:
            request = self._unsent[0]
            is_write = request.part.job.op is Op.WRITE
            with self.loop.gate:
                gone = withdrawn(request.regions) if is_write else None
                if gone is None:
                    try:
                        count = self._sock.sendmsg(request.outgoing.views())
                    except BlockingIOError:
                        self._watch(READABLE | WRITABLE)
                        return
            if gone is not None:  # half a frame cannot be taken back: the stream is lost
                request.part.job.stop(gone)
                raise RangeRefused(gone)
            self._progress_s = time.monotonic()
            request.outgoing.advance(count)
            if request.outgoing.is_ahead:
                request.outgoing.is_ahead = False
                os.sched_yield()
            if request.outgoing.is_sent:
                self._unsent.popleft()
        self._watch(READABLE)

    def _watch(self, events: int) -> None:
        if events != self._events and self._sock is not None:
            self._events = events
            if not self._taken_over:
                self.loop.modify(self._sock.fileno(), events)

    # ------------------------------------------------------------- receiving

    def _on_event(self, events: int) -> None:
        with self._lock:
            self._handle(events)

    def _handle(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        try:
            if events & WRITABLE:
                self._flush()
            if events & (READABLE | HUNG_UP):
                if not self._requests:
                    self._check_quiet(sock)
                self._receive(sock)
        except (OSError, ProtocolError, RangeRefused) as error:
            self.abort(str(error))

    def _check_quiet(self, sock: socket.socket) -> None:
        """Raise OSError because there is nothing to read, unless another thread has read it."""
        with contextlib.suppress(BlockingIOError):
            sock.recv(1, socket.MSG_PEEK)
            raise ConnectionResetError("the peer hung up")  # or it sends something unasked

    def _expect(self, num_bytes: int, then: Callable[[memoryview], None]) -> None:
        if len(self._want) != num_bytes:
            self._want = memoryview(bytearray(num_bytes))
        self._num_filled = 0
        self._then = then

    def _expect_header(self) -> None:
        assert self._channel is not None
        self._expect(wire.HEADER_BYTES + self._channel.received.num_tag_bytes, self._on_header)

    def _receive(self, sock: socket.socket) -> None:
        while self._sock is sock and self._requests:
            try:
                if self._receiving is not None:
                    count = self._receive_payload(sock, self._receiving, self._requests[0])
                else:
                    count = sock.recv_into(self._want[self._num_filled :])
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("the peer hung up")
            self._progress_s = time.monotonic()
            if self._receiving is None:
                self._num_filled += count
                if self._num_filled == len(self._want):
                    self._then(self._want)
            elif self._receiving.num_left == 0:
                self._receiving = None
                self._end_request(None)

    def _on_header(self, data: memoryview) -> None:
        assert self._channel is not None
        seals = self._channel.received
        header = wire.parse_header(memoryview(seals.open(data)), _ANSWERS)
        if not self._requests or header.request_id != self._requests[0].request_id:
            raise ProtocolError("the peer answered a request that was not made")
        request = self._requests[0]
        if not (request.outgoing.is_sent and header.kind in (request.answer_kind, wire.REFUSED)):
            raise ProtocolError("the peer's answer is of another kind than the request")
        if header.kind == wire.DONE:
            self._end_request(None)
        elif header.kind == wire.REFUSED:
            self._expect(max(1, header.num_bytes + seals.num_tag_bytes), self._on_reason)
        elif header.kind == wire.TOLD:
            answered = functools.partial(self._on_answer, header.num_bytes)
            self._expect(header.grant + seals.num_tag_bytes, answered)
        elif header.num_bytes != request.part.slice.num_bytes:
            raise ProtocolError("the peer's answer does not have the length that was asked for")
        else:
            lengths = [op.num_bytes for op in request.part.slice.pieces]
            self._receiving = Incoming(request.views, lengths, seals)

    def _on_answer(self, num_bytes: int, data: memoryview) -> None:
        """Take the answer to a question. Its bytes follow, whole pieces from the first on."""
        assert self._channel is not None
        request = self._requests[0]
        answer = bytes(self._channel.received.open(data, 0))
        size = request.part.slice.piece_bytes
        count, rest = divmod(num_bytes, size) if size else (0, num_bytes)
        if rest or count > len(request.views):
            raise ProtocolError("the peer's answer does not have the length that was asked for")
        request.part.job.set_answer(answer, num_bytes)
        if count:
            views = request.views[:count]
            self._receiving = Incoming(views, [size] * count, self._channel.received)
        else:
            self._end_request(None)

    def _on_reason(self, data: memoryview) -> None:
        assert self._channel is not None
        reason = bytes(self._channel.received.open(data, 0)).decode(errors="replace")
        self._end_request(f"{self._requests[0].part.job.peer.engine_id} refused: {reason}")

    def _receive_payload(self, sock: socket.socket, payload: Incoming, request: Request) -> int:
        """Read some of a READ's payload into our memory, or drop it if the READ was given up."""
        with self.loop.gate:
            gone = withdrawn(request.regions)
            if request.given_up or gone is not None:
                count = payload.drop(sock, self.loop.scratch)
            else:
                count = payload.receive(sock)
        if gone is not None and not request.given_up:
            request.given_up = True
            request.part.job.finish(gone)
        return count

    def _end_request(self, error: str | None) -> None:
        request = self._requests.popleft()
        self._num_bytes -= request.part.slice.num_bytes
        self._expect_header()
        if not request.given_up:
            if error is None:
                job = request.part.job
                num_bytes = job.num_bytes if job.question else request.part.slice.num_bytes
                self._owner.arrived(self, num_bytes, request.posted_s, self._progress_s)
            request.part.job.finish(error, (self.nic,))
        # A caller that waits for the job wakes now: with nothing to send, get out of its way.
        if self.state is ConnectionState.READY and (self._unsent or self._owner.has_work):
            self._pump()
