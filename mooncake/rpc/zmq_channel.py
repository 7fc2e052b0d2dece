"""The channel between processes, over ZeroMQ: one bound socket to receive, one a peer to send.

Owns its ZeroMQ context and sockets; decides nothing. Traffic is encrypted and authenticated with
CURVE: the key pair of the bound end comes from the cluster secret, so who does not know the secret
can neither compute the key to connect with nor pose as a worker.
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


@dataclass(frozen=True, kw_only=True)
class ZmqLimits:
    """Bounds of one channel."""

    queue_messages: int = 2000
    """High-water mark a peer, each way; to a full queue messages are dropped and counted."""
    message_bytes: int = MAX_MESSAGE_BYTES
    num_peers: int = 1024
    """Sending sockets kept; beyond it the one unused longest is closed."""
    idle_s: float = 60.0
    """A sending socket unused for this long is closed; the next message connects again."""
    linger_ms: int = 300
    """How long `close` waits for queued messages to leave."""


@dataclass
class ChannelCounters:
    """What a channel did since it was opened."""

    num_sent: int = 0
    num_received: int = 0
    num_dropped: int = 0
    """Not sent: queue of the peer full, message too long, address unusable."""
    num_malformed: int = 0
    """Arrived but were not messages of this protocol version."""


def server_keys(secret: str) -> tuple[bytes, bytes]:
    """Return the (public, secret) CURVE keys, Z85, of every bound socket of the cluster."""
    seed = hmac.digest(b"mooncake channel curve key v1", secret.encode(), hashlib.sha256)
    secret_key = z85.encode(seed)
    return zmq.curve_public(secret_key), secret_key


class ZmqChannel:
    """A `PolledChannel` whose addresses look like "tcp://127.0.0.1:43123".

    `send` may be called from any thread, `receive` from one. Never blocks but in `close`.
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
        """Sending sockets open now."""
        return len(self._peers)

    def send(self, address: str, message: AnyMessage) -> None:
        """Queue `message` for `address`. Raises ProtocolError when it cannot be encoded."""
        data = encode(message)
        if len(data) > self._limits.message_bytes:
            self._drop(f"{type(message).__name__} of {len(data)} bytes is too long", address)
            return
        with self._lock:
            if self._closed:
                return
            now = self._clock.now()
            self._forget_idle(now)
            peer = self._peer(address, now)
            if peer is None:
                self._drop("unusable address", address)
                return
            try:
                peer.socket.send(data, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._drop(f"not queued ({error})", address)
                return
            self.counters.num_sent += 1

    def _peer(self, address: str, now: float) -> _Peer | None:
        peer = self._peers.get(address)
        if peer is None:
            socket = self._connect(address)
            if socket is None:
                return None
            while len(self._peers) >= self._limits.num_peers:
                self._peers.popitem(last=False)[1].socket.close()
            peer = self._peers[address] = _Peer(socket, now)
        peer.used_s = now
        self._peers.move_to_end(address)
        return peer

    def _connect(self, address: str) -> zmq.Socket[bytes] | None:
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
            return None
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
        """Readable when `receive` may return something (or nothing: it can fire once too often)."""
        return self._ready.fileno()

    def receive(self) -> list[AnyMessage]:
        """Return what has arrived, oldest first, without waiting; garbage is counted."""
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
    """Have ZeroMQ notice a host that vanished without a word."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
