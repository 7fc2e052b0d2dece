"""The channel between processes, over ZeroMQ: one bound socket to receive, and one socket per peer
to send.

Owns its ZeroMQ context and sockets. Traffic is encrypted and authenticated with CURVE. The bound
socket has the key of its process's credential, and its address ends in this key
("tcp://10.0.0.7:43123#KEY"). A socket whose address people type has the cluster's key instead,
which is derived from the cluster secret (the first, where there are two). Each message carries the
sender's certificate; a message is refused here if its connection did not prove the certificate's
key, or if the sender's role may not send it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from mooncake.base.bounded_map import BoundedMap
from mooncake.base.clock import Clock, MonotonicClock
from mooncake.base.errors import ConfigError, Forbidden, ProtocolError
from mooncake.base.mailbox import Mailbox
from mooncake.base.messages import AskCluster, Drain, Refused, StepOutputs, WorkerHello
from mooncake.base.pool_messages import AnyMessage, ForgetBlocks, RemoveBlocks
from mooncake.base.rights import Sender, refusal, speaker_of
from mooncake.identity.credential import (
    Certificate,
    ClusterKeys,
    Credential,
    check_certificate,
    objection,
)
from mooncake.rpc.channel import PeerEnded
from mooncake.rpc.codec import (
    MAX_MESSAGE_BYTES,
    UnknownMessage,
    certificate_of,
    decode,
    encode,
    head_of,
)
from mooncake.rpc.ended_peers import EndedPeers
from mooncake.rpc.listeners import set_keys
from mooncake.telemetry.audit import audit

_LOG = logging.getLogger(__name__)
_MAX_PER_RECEIVE = 4096
_LOGGED_EACH = 1000
_ZAP = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ asks whether to accept the key of each new connection."""
_MAX_KNOWN = 4096
"""Certificates remembered as checked, and peers about which a refusal was logged."""
MAX_UNPROVEN = 128
"""Connections on which no valid message has come. When there are more, the oldest is shut. So a
flood of them takes no peer's place: a real peer sends something within milliseconds, and connects
again if it was shut.
"""
MAX_PER_CLIENT = 256
"""Connections of all pool clients that share a credential, and names that they use. When there are
more connections, the oldest is shut; a further name is refused.
"""
MAX_CLIENT_BYTES = 2 * 2**20
"""Longest message of a client, because the receiver may keep it. A message that names as many
blocks as is allowed (`rights.MAX_KEYS`) has half of it.
"""
MAX_HELLO_BYTES = 16 * 2**10
"""Longest hello of a client, because gateways remember it for as long as the client is there."""
MAX_ANSWERED_BYTES = 4 * MAX_CLIENT_BYTES
"""A longer message of a client is not even read, so the client is not told why it is refused. What
a client sends so is thrown away faster than it comes.
"""
_CLIENT_IDLE_S = 60.0
"""Another client may take a name that was not used for this long."""
LOOK_S = 2.0
"""Seconds between two checks of the certificates of all connections. A connection that fails two
checks in a row is shut.
"""
FIRST_RETRY_S = 0.05
"""If a port cannot be bound anew because it is not free, it is tried again after this time, then
after twice as long each time, up to `LOOK_S`.
"""
_HANDSHAKE_MS = 5000
_POLLIN = int(zmq.POLLIN)
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
    """Messages not sent: a queue was full, the message too long, or the address unusable."""
    num_malformed: int = 0
    """Frames that arrived and were no messages of this protocol version."""
    num_refused: int = 0
    """Arrived, but the sender's credential does not allow them."""


class ZmqChannel:
    """A `PolledChannel` whose addresses look like "tcp://127.0.0.1:43123".

    Any thread may call `send`, one thread `receive`. Only `close` blocks.
    """

    def __init__(
        self,
        bind_host: str = "127.0.0.1",
        *,
        credential: Credential,
        ports: tuple[int, int] | None = None,
        is_typed: bool = False,
        advertise_host: str | None = None,
        tells_ends: bool = False,
        limits: ZmqLimits | None = None,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """Bind the first free port from the first to the last of `ports`; None: any free port.

        `advertise_host` is the host that peers connect to (needed when `bind_host` is a wildcard).
        `is_typed`: people type the address, without a key. `tells_ends`: `receive` returns
        `PeerEnded` for peers whose process has ended. `unix_time` is the clock by which
        certificates expire.

        Raises ConfigError when the address cannot be bound.
        """
        self._limits = limits or ZmqLimits()
        self._clock = clock or MonotonicClock()
        self._credential = credential
        self._gate = _Gate(credential, unix_time)
        self._signed, self._head = credential.signed, head_of(credential.signed)
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closed = False
        self._look_s = 0.0
        """When the certificates of connections are looked at next."""
        self.counters = ChannelCounters()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._limits.num_peers + _SPARE_SOCKETS)
        self._doorbell = self._context.socket(zmq.REP)
        self._inbox = self._context.socket(zmq.PULL)
        self._connections = _Connections(self._inbox, self._context)
        try:
            self._doorbell.bind(_ZAP)
            seed = (credential.listening_seed if is_typed else None) or credential.channel_seed
            self._bound = _Bound(self._inbox, bind_host, seed, self._limits)
            bound_port = self._bound.bind(*(ports or (0, 0)))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            among = "-".join(str(port) for port in dict.fromkeys(ports or (0,)))
            raise ConfigError(f"cannot listen on {bind_host}:{among}: {error}") from error
        self._port = bound_port
        self._address = f"tcp://{_bracketed(advertise_host or bind_host)}:{bound_port}"
        self._has_own_key = seed == credential.channel_seed
        if self._has_own_key:
            self._address += f"#{credential.certificate.channel_key.hex()}"
        # The socket's own descriptor only fires on changes; this one also stays readable while
        # `receive` has left something behind.
        self._again: Mailbox[None] = Mailbox()
        self._ready = select.epoll()
        self._ready.register(self._inbox.FD, select.EPOLLIN)
        self._ready.register(self._doorbell.FD, select.EPOLLIN)
        self._ready.register(self._connections.fileno(), select.EPOLLIN)
        self._ready.register(self._again.fileno(), select.EPOLLIN)
        self._ended = EndedPeers(self._ready) if tells_ends else None
        self._reached: BoundedMap[str, None] = BoundedMap(_MAX_KNOWN)
        """Addresses sent to whose ends are reported. They are kept longer than the sockets."""
        # What came between binding and now may have fired already: look once.
        self._again.ring()

    @property
    def address(self) -> str:
        return self._address

    @property
    def num_peers(self) -> int:
        """The number of open sending sockets."""
        return len(self._peers)

    def figures(self) -> Mapping[str, float]:
        return {"messages_refused": self.counters.num_refused}

    def send(self, address: str, message: AnyMessage) -> None:
        """Queue `message` for `address`. A message that cannot be queued is dropped and counted.
        Raises ProtocolError when it cannot be encoded.
        """
        if self._signed is not self._credential.signed:
            self._signed = self._credential.signed
            self._head = head_of(self._signed)
        data = encode(message, self._head)
        if len(data) > self._limits.message_bytes:
            parts = message.smaller() if isinstance(message, StepOutputs) else []
            if not parts:
                self._drop(f"{type(message).__name__} of {len(data)} bytes is too long", address)
            for part in parts:  # the outputs of other requests get through
                self.send(address, part)
            return
        with self._lock:
            if self._closed:
                return
            now = self._clock.now()
            self._forget_idle(now)
            try:
                self._peer(address, now).send(data)
            except (zmq.ZMQError, ValueError) as error:  # a lost message, as on a broken link
                self._drop(f"not queued ({error})", address)
                return
            self.counters.num_sent += 1

    def _peer(self, address: str, now: float) -> _Peer:
        """Return the peer, connected. Raises ZMQError or ValueError when the address is unusable,
        or no descriptor is left for a socket.
        """
        clusters = () if "#" in address else self._credential.clusters
        peer = self._peers.get(address)
        if peer is not None and peer.clusters is not clusters and "#" not in address:
            self._peers.pop(address).close()  # the secret was replaced
            peer = None
        if peer is None:
            plain, _, key = address.partition("#")
            keys = [each.channel_key for each in clusters] or [bytes.fromhex(key)]
            peer = _Peer([], clusters, now)
            try:
                for each in keys:
                    peer.sockets.append(self._connect(plain, each, queues=not peer.sockets))
            except (zmq.ZMQError, ValueError):
                peer.close()
                raise
            while len(self._peers) >= self._limits.num_peers:
                self._peers.popitem(last=False)[1].close()
            self._peers[address] = peer
            self._reached[address] = None
        peer.used_s = now
        self._peers.move_to_end(address)
        return peer

    def _connect(self, address: str, peer_key: bytes, *, queues: bool) -> zmq.Socket[bytes]:
        """Return a socket to a peer. `queues`: the socket takes messages before the peer has proven
        its key, too.
        """
        socket = self._context.socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.IMMEDIATE, int(not queues))
            socket.setsockopt(zmq.LINGER, self._limits.linger_ms)
            socket.setsockopt(zmq.SNDHWM, self._limits.queue_messages)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)  # names are resolved anew then
            socket.setsockopt(zmq.IPV6, int("[" in address))
            set_keys(socket, self._credential, peer_key)
            _detect_dead_peers(socket)
            socket.connect(address)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        return socket

    def _forget_idle(self, now: float) -> None:
        while self._peers:
            oldest = next(iter(self._peers.values()))
            if now - oldest.used_s < self._limits.idle_s:
                return
            self._peers.popitem(last=False)[1].close()

    def _drop(self, reason: str, address: str) -> None:
        if self.counters.num_dropped % _LOGGED_EACH == 0:
            _LOG.warning("message to %s dropped: %s", address, reason)
        self.counters.num_dropped += 1

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` may return messages."""
        return self._ready.fileno()

    def receive(self) -> list[AnyMessage | PeerEnded]:
        """Return the arrived messages, oldest first, without waiting; malformed
        ones are counted.
        """
        messages: list[AnyMessage | PeerEnded] = []
        if self._closed:
            return messages
        self._again.receive()
        self._open_door()
        self._connections.look(self._port)
        if (now := self._clock.now()) >= self._look_s:
            self._look_s = now + LOOK_S
            self._connections.hang_up_untrusted(self._gate.objection, self._port)
            retry_s = None if self._has_own_key else self._bound.follow(self._credential)
            if retry_s is not None:
                self._look_s = now + retry_s
                self._ring_in(retry_s)
        for _ in range(_MAX_PER_RECEIVE):
            try:
                if not _has_some(self._inbox):
                    break
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # its connection has ended in between
                break
            try:
                message = self._taken(frame)
                if message is not None:
                    messages.append(message)
            except ProtocolError as error:
                if self.counters.num_malformed % _LOGGED_EACH == 0:
                    _LOG.warning("message dropped: %s", error)
                self.counters.num_malformed += 1
        else:
            self._again.ring()
        self.counters.num_received += len(messages)
        if self._ended is not None:
            for key in self._connections.take_closed():
                with self._lock:
                    addresses = [each for each in self._reached if each.endswith(f"#{key}")]
                for address in addresses:
                    self._ended.ask(address)
            messages += [PeerEnded(address) for address in self._ended.look()]
        with self._lock:
            self._forget_idle(self._clock.now())
        return messages

    def _ring_in(self, seconds: float) -> None:
        """Have the driver call `receive` again after this many seconds. Nobody connects to a port
        that is not bound, so nothing else might wake the driver.
        """
        timer = threading.Timer(seconds, self._again.ring)
        timer.daemon = True
        timer.start()

    def _open_door(self) -> None:
        """Accept connections of any key, and mark each message with the key that its connection has
        proven. What that key may do depends on the certificate that comes with the message.
        """
        with contextlib.suppress(zmq.Again):
            while _has_some(self._doorbell):
                asked = self._doorbell.recv_multipart(zmq.NOBLOCK)
                key = asked[6].hex() if len(asked) == 7 else ""
                verdict = (b"200", b"OK") if key else (b"400", b"CURVE only")
                self._doorbell.send_multipart(
                    [*asked[:2], *verdict, key.encode(), b""], zmq.NOBLOCK
                )

    def _taken(self, frame: zmq.Frame) -> AnyMessage | None:
        """Return the message that has arrived, or None if it is refused, and the sender was told
        why. Raises ProtocolError when the bytes are no message.
        """
        data, key = frame.bytes, str(frame.get("User-Id"))
        whence = str(frame.get("Peer-Address"))
        try:
            holder = self._gate.holder(data, key)
        except Forbidden as error:
            self._refuse(key, error.message)
            audit("proof_failed", proof="credential", whence=whence, reason=error.message)
            self._connections.reject(frame.get(zmq.SRCFD), self._port)
            return None
        self._connections.proven(frame.get(zmq.SRCFD), holder, self._port)
        who = holder.certificate.name
        if holder.sender.speaks_for_itself and len(data) > MAX_ANSWERED_BYTES:
            self._refuse_message(key, who, whence, f"a message of {len(data)} bytes is not read")
            return None
        try:
            message = decode(data, len(holder.head))
        except UnknownMessage as error:
            if error.asker is not None:
                refused = Refused(
                    asker=error.asker, ticket=error.ticket, message=error.kind,
                    reason=error.message,
                )  # fmt: skip
                self._answer(holder.sender, refused, whence)
            raise
        reason = (
            self._gate.expiry(holder.certificate)
            or refusal(holder.sender, message, whence)
            or holder.over(message, len(data), self._clock.now())
        )
        if reason is None:
            if type(message) in _AUDITED:
                _audit(message, who, whence)
            return message
        self._refuse_message(key, who, whence, reason)
        self._send_refusal(holder.sender, message, reason, whence)
        return None

    def _refuse_message(self, key: str, who: str, whence: str, reason: str) -> None:
        self._refuse(key, reason)
        audit("message_refused", kind=key, who=who, whence=whence, reason=reason)

    def _refuse(self, key: str, reason: str) -> None:
        self.counters.num_refused += 1
        self._gate.complain(key, reason)

    def _send_refusal(self, sender: Sender, message: AnyMessage, reason: str, whence: str) -> None:
        """Tell a client, or a process that wants to join, why its message is refused. Other senders
        are told nothing.
        """
        speaker = message.asker if isinstance(message, AskCluster) else speaker_of(message)
        if speaker is not None and sender.is_own(speaker, whence):
            ticket = getattr(message, "ticket", 0)
            kind = type(message).__name__
            self._answer(
                sender, Refused(asker=speaker, ticket=ticket, message=kind, reason=reason), whence
            )

    def _answer(self, sender: Sender, refused: Refused, whence: str) -> None:
        """Send a refusal to the sender; to a client only at the address that belongs to it."""
        if not sender.speaks_for_itself or sender.is_own(refused.asker, whence):
            self.send(refused.asker.address, refused)

    def close(self) -> None:
        """Stop receiving, wait up to `linger_ms` for queued messages, free the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
        if self._ended is not None:
            self._ended.close()
        self._ready.close()
        self._again.close()
        self._connections.close()
        self._inbox.close()
        self._doorbell.close()
        self._context.destroy(linger=self._limits.linger_ms)


_AUDITED = {Drain: "drain", RemoveBlocks: "removal", ForgetBlocks: "removal"}
"""Messages for which the audit log records the sender. A gateway passes on what `ForgetBlocks` says
to nodes that are away, which then see only the gateway's name.
"""


def _audit(message: AnyMessage, who: str, whence: str) -> None:
    event = _AUDITED[type(message)]
    num_blocks = len(message.keys) if isinstance(message, (RemoveBlocks, ForgetBlocks)) else None
    audit(event, kind=who, who=who, whence=whence, num_blocks=num_blocks)


class _Connections:
    """The connections to the bound socket by descriptor, oldest first: those without a valid
    message so far, and those of each credential. ZeroMQ reports connections but has no call to
    close one.
    """

    def __init__(self, inbox: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._inbox = inbox
        self._strangers: dict[int, None] = {}
        self._of: dict[str, dict[int, None]] = {}
        """Connections by the key that they have proven."""
        self._key: dict[int, str] = {}
        self._holders: dict[str, _Holder] = {}
        """The newest holder for each key that has a connection."""
        self._doubted: set[str] = set()
        """Keys to which the last look objected."""
        self._closed: list[str] = []
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)  # the sender is ZeroMQ's thread: it must not wait
        inbox.monitor("inproc://strangers", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events.connect("inproc://strangers")

    def fileno(self) -> int:
        descriptor: int = self._events.FD
        return descriptor

    def proven(self, descriptor: int, holder: _Holder, port: int) -> None:
        """Record that a valid message of `holder` has come on a connection to our `port`. If one
        client has too many connections, shut its oldest.
        """
        key = holder.sender.channel_key
        if key in self._of:
            self._holders[key] = holder
        if descriptor not in self._strangers:
            return  # known already, or closed, or `look` will report it
        del self._strangers[descriptor]
        self._key[descriptor], self._holders[key] = key, holder
        own = self._of.setdefault(key, {})
        own[descriptor] = None
        if holder.sender.speaks_for_itself and len(own) > MAX_PER_CLIENT:
            oldest = next(iter(own))
            self._forget(oldest)
            _hang_up(oldest, port, f"{holder.sender.name} has more than {MAX_PER_CLIENT}")

    def reject(self, descriptor: int, port: int) -> None:
        """Hang up a connection to our `port` on which a process of another cluster has spoken. We
        send it nothing, so this alone tells it that it is refused. One that is proven stays.
        """
        self.look(port)  # the message may be here before we have seen the connection
        if descriptor in self._strangers:
            del self._strangers[descriptor]
            _hang_up(descriptor, port)

    def _forget(self, descriptor: int) -> None:
        self._strangers.pop(descriptor, None)
        key = self._key.pop(descriptor, None)
        if key is not None:
            del self._of[key][descriptor]
            if not self._of[key]:
                del self._of[key]
                self._holders.pop(key, None)

    def hang_up_untrusted(self, objection: Callable[[_Holder], str | None], port: int) -> None:
        """Shut all connections of a holder whose newest certificate was objected to by this look
        and by the one before.
        """
        before, self._doubted = self._doubted, set()
        for key in list(self._of):
            reason = objection(self._holders[key])
            if reason is None:
                continue
            self._doubted.add(key)
            if key in before:
                audit(
                    "session_ended",
                    what="control",
                    peer=self._holders[key].sender.name,
                    reason=reason,
                )
                for descriptor in list(self._of[key]):
                    self._forget(descriptor)
                    _hang_up(descriptor, port, reason)

    def take_closed(self) -> list[str]:
        """Return the keys of the proven connections that were closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def look(self, port: int) -> None:
        """Read what ZeroMQ reports, and shut the oldest connections where there are too many.
        `port` is that of the bound socket.
        """
        with contextlib.suppress(zmq.Again):
            while _has_some(self._events):
                told = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                if (key := self._key.get(told["value"])) is not None:
                    self._closed = [*self._closed, key][-_MAX_KNOWN:]
                self._forget(told["value"])
                if told["event"] == zmq.EVENT_ACCEPTED:
                    self._strangers[told["value"]] = None
                if len(self._strangers) > MAX_UNPROVEN:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _hang_up(oldest, port, f"{MAX_UNPROVEN} prove nothing")

    def close(self) -> None:
        self._inbox.disable_monitor()
        self._events.close()


def _has_some(socket: zmq.Socket[bytes]) -> bool:
    """Return whether there is a message to receive. Most often there is none, and an exception that
    says so costs more than this question.
    """
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _hang_up(descriptor: int, port: int, reason: str = "") -> None:
    """Shut down a connection to our `port` that ZeroMQ owns; ZeroMQ will then close it. If the
    descriptor has been reused by now, this does nothing, or it shuts another connection of the same
    port.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getsockname()[1:2] == (port,):
            connection.shutdown(socket.SHUT_RDWR)
            if reason:
                _LOG.warning("a control connection was closed: %s", reason)


@dataclass(frozen=True, slots=True)
class _Holder:
    """The owner of a certificate that has been checked."""

    head: bytes
    """What all its messages begin with."""
    certificate: Certificate
    sender: Sender
    signed: bytes
    names: OrderedDict[tuple[str, str, str], float]
    """Names that it has used lately, and when; the one used longest ago comes first."""

    def over(self, message: AnyMessage, num_bytes: int, now: float) -> str | None:
        """Return why a message is too long for a client, or why the client may not use the name in
        it. Return None if the message is allowed.
        """
        if not self.sender.speaks_for_itself:
            return None
        most = MAX_HELLO_BYTES if isinstance(message, WorkerHello) else MAX_CLIENT_BYTES
        if num_bytes > most:
            return (
                f"{type(message).__name__} has {num_bytes} bytes, more than the {most} that a "
                "client may send at once"
            )
        speaker = speaker_of(message)
        if speaker is None:
            return None
        name = (speaker.worker_id, speaker.epoch, speaker.address)
        while self.names and next(iter(self.names.values())) <= now - _CLIENT_IDLE_S:
            self.names.popitem(last=False)
        if name not in self.names and len(self.names) >= MAX_PER_CLIENT:
            return (
                f"{self.sender.name} speaks for {MAX_PER_CLIENT} clients already: end some, or "
                "give them a credential of their own"
            )
        self.names[name] = now
        self.names.move_to_end(name)
        return None


class _Gate:
    """Knows who is behind each connection. A check is remembered by the connection's key, so a
    further message costs one comparison.
    """

    def __init__(self, credential: Credential, unix_time: Callable[[], float]) -> None:
        self._credential = credential
        self._clusters = credential.clusters
        self._unix_time = unix_time
        self._known: BoundedMap[str, _Holder] = BoundedMap(_MAX_KNOWN)
        self._complained: BoundedMap[str, None] = BoundedMap(_MAX_KNOWN)

    def holder(self, data: bytes, channel_key: str) -> _Holder:
        """Return who sent `data` on a connection that has proven `channel_key`.

        Raises:
            Forbidden: the certificate is of another cluster or key.
            ProtocolError: it is no message.
        """
        if self._clusters is not self._credential.clusters:
            self._clusters = self._credential.clusters
            self._known.clear()
        known = self._known.get(channel_key)
        if known is not None and data.startswith(known.head):
            return known
        names = OrderedDict() if known is None else known.names  # of another certificate, too
        found = self._check(certificate_of(data), channel_key, names)
        self._known[channel_key] = found
        return found

    def objection(self, holder: _Holder) -> str | None:
        """Return why a connection of `holder` is no longer valid, or None if it is valid."""
        return objection(holder.certificate, self._unix_time(), self._credential, holder.signed)

    def expiry(self, certificate: Certificate) -> str | None:
        """Return why a certificate has expired, or None if it has not."""
        return objection(certificate, self._unix_time(), self._credential)

    def _check(
        self, signed: bytes, channel_key: str, names: OrderedDict[tuple[str, str, str], float]
    ) -> _Holder:
        try:
            certificate = check_certificate(signed, self._credential)
        except ProtocolError as error:
            raise Forbidden(error.message) from error
        if certificate.channel_key.hex() != channel_key:
            raise Forbidden(
                "the key of the connection is not the one in the certificate of "
                f"{certificate.name!r}"
            )
        return _Holder(head_of(signed), certificate, certificate.sender(), signed, names)

    def complain(self, channel_key: str, reason: str) -> None:
        """Log why a message is refused, once for each of the peers refused lately. However many
        strangers were refused before, the next peer's refusal is logged.
        """
        if channel_key not in self._complained:
            _LOG.warning("message refused: %s", reason)
        self._complained[channel_key] = None


@dataclass
class _Peer:
    sockets: list[zmq.Socket[bytes]]
    """One socket for each key that the peer may have: an address that people type names none. The
    first one queues messages that none can send now.
    """
    clusters: Sequence[ClusterKeys]
    """The clusters whose keys these are; () = the address names its key."""
    used_s: float

    def send(self, data: bytes) -> None:
        """Queue `data` on the first socket that takes it. Raises ZMQError when the queue is
        full.
        """
        for each in self.sockets[1:]:
            with contextlib.suppress(zmq.Again):
                each.send(data, zmq.NOBLOCK)
                return
        self.sockets[0].send(data, zmq.NOBLOCK)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


class _Bound:
    """The address at which the inbox is bound, and its key there."""

    def __init__(self, inbox: zmq.Socket[bytes], host: str, seed: bytes, limits: ZmqLimits) -> None:
        self._inbox, self._host, self._limits = inbox, _bracketed(host), limits
        self._endpoint = ""
        """The endpoint at which it is bound; "" = none."""
        self._port = 0
        self._seed = seed
        self._retry_s = FIRST_RETRY_S

    def bind(self, first: int, last: int) -> int:
        """Bind the first free port; return it. Raises ZMQError: none is free."""
        inbox = self._inbox
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, self._limits.queue_messages)
        inbox.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        inbox.setsockopt(zmq.IPV6, int(":" in self._host))
        inbox.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._seed))
        inbox.setsockopt(zmq.ZAP_DOMAIN, b"mooncake")
        _detect_dead_peers(inbox)
        for port in range(first, last + 1):
            try:
                inbox.bind(f"tcp://{self._host}:{port or '*'}")
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    raise
        self._endpoint = inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(self._endpoint.rsplit(":", 1)[1])
        return self._port

    def follow(self, credential: Credential) -> float | None:
        """Use the cluster key that `credential` gives now. When the key changes, connections end
        and are made again. Return None when that is done. While the port is not free, as a rule
        for a moment only, return the seconds after which to call this again.
        """
        seed = credential.listening_seed or self._seed
        if self._endpoint:
            if seed == self._seed:
                return None
            self._inbox.unbind(self._endpoint)
            self._endpoint = ""
        if seed != self._seed:
            self._seed = seed
            self._inbox.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(seed))
        try:
            self._inbox.bind(f"tcp://{self._host}:{self._port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LOOK_S)
            if retry_s < LOOK_S == self._retry_s:
                _LOG.warning(
                    "port %d cannot be given the key of the new cluster secret: another process "
                    "listens there; until it ends nobody can join here",
                    self._port,
                )
            return retry_s
        self._endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._retry_s = FIRST_RETRY_S
        _LOG.info("port %d has the key of the new cluster secret", self._port)
        return None


def _detect_dead_peers(socket: zmq.Socket[bytes]) -> None:
    """Let ZeroMQ notice a host that disappeared without closing its connections."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
