"""The channel between processes, over ZeroMQ: one bound socket to receive, and one socket per peer
to send.

Owns its ZeroMQ context and sockets; decides nothing. Traffic is encrypted and authenticated with
CURVE: the key pair of the bound end is derived from the cluster secret, so a process without the
secret can neither compute the key to connect with nor pose as a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import select
import threading
from collections import OrderedDict
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from mooncake.base.any_message import AnyMessage
from mooncake.base.clock import Clock, MonotonicClock
from mooncake.base.errors import ConfigError, ProtocolError
from mooncake.rpc.codec import MAX_MESSAGE_BYTES, decode, encode

_LOG = logging.getLogger(__name__)
_MAX_PER_RECEIVE = 4096
_LOGGED_EACH = 1000
_SPARE_SOCKETS = 1023
"""ZeroMQ's own limit, added to ours: closed sockets count until the last message has left."""


@dataclass(frozen=True, kw_only=True)
class ZmqLimits:
    """Bounds of one channel."""

    queue_messages: int = 2000
    """High-water mark per peer, each way; messages to a full queue are dropped and counted."""
    message_bytes: int = MAX_MESSAGE_BYTES
    num_peers: int = 1024
    """Sending sockets kept; beyond this the one unused for longest is closed."""
    idle_s: float = 60.0
    """A sending socket unused for this long is closed; the next message connects again."""
    linger_ms: int = 300
    """How long `close` waits for queued messages to leave."""


@dataclass
class ChannelCounters:
    """Counts since the channel was opened."""

    num_sent: int = 0
    num_received: int = 0
    num_dropped: int = 0
    """Not sent: the peer's queue was full, the message too long, or the address unusable."""
    num_malformed: int = 0
    """Arrived, but were no messages of this protocol version."""


def server_keys(secret: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CURVE keys, Z85, of every bound socket of the cluster."""
    seed = hmac.digest(b"mooncake channel curve key v1", secret.encode(), hashlib.sha256)
    secret_key = z85.encode(seed)
    return zmq.curve_public(secret_key), secret_key


class ZmqChannel:
    """A `PolledChannel` whose addresses look like "tcp://127.0.0.1:43123".

    Any thread may call `send`, one thread `receive`. Only `close` blocks.
    """

    def __init__(
        self,
        bind_host: str = "127.0.0.1",
        *,
        secret: str,
        port: int = 0,
        advertise_host: str | None = None,
        limits: ZmqLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Bind. Port 0 takes a free one; `advertise_host` is what peers connect to (needed when
        `bind_host` is a wildcard). Raises ConfigError when the address cannot be bound.
        """
        if not secret:
            raise ConfigError("the cluster secret is empty: set one, the same for all workers")
        self._limits = limits or ZmqLimits()
        self._clock = clock or MonotonicClock()
        self._public_key, secret_key = server_keys(secret)
        self._client_public, self._client_secret = zmq.curve_keypair()
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closed = False
        self.counters = ChannelCounters()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._limits.num_peers + _SPARE_SOCKETS)
        self._inbox = self._context.socket(zmq.PULL)
        try:
            bound_port = self._bind(bind_host, port, secret_key)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on {bind_host}:{port}: {error}") from error
        self._address = f"tcp://{_bracketed(advertise_host or bind_host)}:{bound_port}"
        # The socket's own descriptor only fires on changes; this one also stays readable while
        # `receive` has left something behind.
        self._again_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        self._ready.register(self._inbox.FD, select.EPOLLIN)
        self._ready.register(self._again_fd, select.EPOLLIN)
        # What came between binding and now may have fired already: look once.
        os.eventfd_write(self._again_fd, 1)

    def _bind(self, host: str, port: int, secret_key: bytes) -> int:
        inbox = self._inbox
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, self._limits.queue_messages)
        inbox.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        inbox.setsockopt(zmq.IPV6, int(":" in host))
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        _detect_dead_peers(inbox)
        inbox.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        endpoint = inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rsplit(":", 1)[1])

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_peers(self) -> int:
        """The number of open sending sockets."""
        return len(self._peers)

    def send(self, address: str, message: AnyMessage) -> None:
        """Queue `message` for `address`; one that cannot be queued is dropped and counted. Raises
        ProtocolError when it cannot be encoded.
        """
        data = encode(message)
        if len(data) > self._limits.message_bytes:
            self._drop(f"{type(message).__name__} of {len(data)} bytes is too long", address)
            return
        with self._lock:
            if self._closed:
                return
            now = self._clock.now()
            self._forget_idle(now)
            try:
                self._peer(address, now).socket.send(data, zmq.NOBLOCK)
            except zmq.ZMQError as error:  # a lost message, as on a broken link
                self._drop(f"not queued ({error})", address)
                return
            self.counters.num_sent += 1

    def _peer(self, address: str, now: float) -> _Peer:
        """Return the peer, connected. Raises ZMQError: the address is unusable, or there is no
        descriptor left for a socket.
        """
        peer = self._peers.get(address)
        if peer is None:
            socket = self._connect(address)
            while len(self._peers) >= self._limits.num_peers:
                self._peers.popitem(last=False)[1].socket.close()
            peer = self._peers[address] = _Peer(socket, now)
        peer.used_s = now
        self._peers.move_to_end(address)
        return peer

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.LINGER, self._limits.linger_ms)
            socket.setsockopt(zmq.SNDHWM, self._limits.queue_messages)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._public_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._client_secret)
            _detect_dead_peers(socket)
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _forget_idle(self, now: float) -> None:
        while self._peers:
            oldest = next(iter(self._peers.values()))
            if now - oldest.used_s < self._limits.idle_s:
                return
            self._peers.popitem(last=False)[1].socket.close()

    def _drop(self, reason: str, address: str) -> None:
        if self.counters.num_dropped % _LOGGED_EACH == 0:
            _LOG.warning("message to %s dropped: %s", address, reason)
        self.counters.num_dropped += 1

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` may return messages."""
        return self._ready.fileno()

    def receive(self) -> list[AnyMessage]:
        """Return the arrived messages, oldest first, without waiting; malformed
        ones are counted.
        """
        messages: list[AnyMessage] = []
        if self._closed:
            return messages
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._again_fd)
        for _ in range(_MAX_PER_RECEIVE):
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append(decode(data))
            except ProtocolError as error:
                if self.counters.num_malformed % _LOGGED_EACH == 0:
                    _LOG.warning("message dropped: %s", error)
                self.counters.num_malformed += 1
        else:
            os.eventfd_write(self._again_fd, 1)
        self.counters.num_received += len(messages)
        with self._lock:
            self._forget_idle(self._clock.now())
        return messages

    def close(self) -> None:
        """Stop receiving, wait up to `linger_ms` for queued messages, free the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.socket.close()
            self._peers.clear()
        self._ready.close()
        os.close(self._again_fd)
        self._inbox.close()
        self._context.destroy(linger=self._limits.linger_ms)


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    used_s: float


def _detect_dead_peers(socket: zmq.Socket[bytes]) -> None:
    """Let ZeroMQ notice a host that disappeared without closing its connections."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
