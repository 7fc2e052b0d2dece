"""The two ends of a control session: a proven stream of small messages between two engines.

The client, which reads and writes, opens it; the owner, whose memory it is, serves it. Both ends
live in an I/O loop. What the messages mean is up to the objects that hold the sessions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from mooncake.base.errors import ProtocolError
from mooncake.telemetry.audit import audit
from mooncake.transfer.net.codec import Answer, Ask, Codec
from mooncake.transfer.net.control_link import ControlLink, begin_to_connect
from mooncake.transfer.net.directory import PeerDirectory
from mooncake.transfer.net.endpoint import PeerKey, address_of
from mooncake.transfer.net.handshake import AcceptingSide, Channel, ConnectingSide, PeerIdentity
from mooncake.transfer.net.io_loop import IoLoop, Timer
from mooncake.transfer.net.listener import whence

_LOG = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
"""The connection of a client that has not proven itself by then is closed."""

Answer_contra = TypeVar("Answer_contra", contravariant=True)


class SessionState(Enum):
    """The state of a client's session with an owner."""

    CONNECTING = "connecting"
    READY = "ready"
    GONE = "gone"


class ClientEvents(Protocol[Answer_contra]):
    """The calls by which a session reports to the peer object that holds it."""

    def on_welcome(self) -> None:
        """Go on: the owner has proven itself, and has ended the connections to be fenced."""

    def on_answer(self, answer: Answer_contra, /) -> None:
        """Take an answer of the owner. Raises ProtocolError to end the session."""

    def on_break(self, reason: str, connection_id: str) -> None:
        """Decide what to do after a ready stream broke: `connect` again, or `end`."""

    def on_gone(self, reason: str) -> None:
        """Release everything: the session has ended for good. Called once."""


class ClientSession(Generic[Ask, Answer]):
    """Our control session with one owner. It may connect again after its stream breaks."""

    def __init__(
        self,
        key: PeerKey,
        directory: PeerDirectory[Any],
        loop: IoLoop,
        connect_s: float,
        events: ClientEvents[Answer],
        codec: Codec[Ask, Answer],
    ) -> None:
        """Prepare to `connect`. Raises ConfigError when the endpoint in `key` is malformed.

        directory: learns whether the owner could be reached.
        connect_s: how long connecting and shaking hands may take.
        """
        self.state = SessionState.CONNECTING
        self._key = key
        self._address = address_of(key.endpoint)
        self._directory = directory
        self._loop = loop
        self._connect_s = connect_s
        self._events = events
        self._codec = codec
        self._handshake: ConnectingSide | None = None
        self._link: ControlLink | None = None
        self._timer: Timer | None = None

    def connect(self, fenced: Sequence[str] = ()) -> None:
        """Begin to connect, and have the owner end the earlier connections `fenced`."""
        self.state = SessionState.CONNECTING
        self._handshake = self._directory.credentials.connect(self._key.engine_id, fenced)
        try:
            sock = begin_to_connect(self._address)
        except OSError as failure:
            reason = f"{self._key.engine_id}: {failure}"
            self._loop.post(functools.partial(self.end, reason, refused=True))
            return
        is_near = isinstance(self._address, str)
        self._link = ControlLink(
            self._loop, sock, self._on_frame, self._on_break, takes_descriptors=is_near
        )
        self._timer = self._loop.call_later(
            self._connect_s, lambda: self.give_up("the peer does not answer")
        )
        self._link.send(self._handshake.first_message)

    def ready(self) -> None:
        """Declare that the owner has let us in and has sent all that is needed to go on."""
        self.state = SessionState.READY
        self._directory.reached(self._key)

    def send(self, ask: Ask) -> None:
        """Send a message to the owner; it is lost when the stream is broken."""
        channel = self._handshake.channel if self._handshake is not None else None
        if self._link is not None and channel is not None:
            self._link.send(channel.sent.seal(self._codec.encode(ask)))

    @contextlib.contextmanager
    def descriptors(self, count: int) -> Iterator[list[int]]:
        """Take the descriptors that came with the owner's last message, and close them afterwards.
        Raises ProtocolError when it sent more or fewer.
        """
        assert self._link is not None
        taken = self._link.take_descriptors()
        try:
            if len(taken) != count:
                raise ProtocolError(f"the peer sent {len(taken)} descriptors instead of {count}")
            yield taken
        finally:
            for descriptor in taken:
                os.close(descriptor)

    def _on_frame(self, body: bytes) -> None:
        assert self._handshake is not None
        assert self._link is not None
        if self._handshake.channel is not None:
            message = self._handshake.channel.received.open(body)
            self._events.on_answer(self._codec.decode_answer(message))
            return
        answer = self._handshake.step(body)
        if answer is not None:
            self._link.send(answer)
        else:
            self._stop_timer()
            self._events.on_welcome()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _hang_up(self) -> None:
        self._stop_timer()
        if self._link is not None:
            self._link.close()
            self._link = None

    def give_up(self, reason: str) -> None:
        """Treat an owner that does not answer as if its stream had broken."""
        if self._link is not None:
            self._on_break(reason)

    def _on_break(self, reason: str) -> None:
        self._hang_up()
        if self.state is not SessionState.READY or self._handshake is None:
            self.end(reason, refused=True)
            return
        _LOG.info("control session with %s broke: %s", self._key.engine_id, reason)
        self.state = SessionState.CONNECTING
        self._events.on_break(reason, self._handshake.hello.connection_id)

    def end(self, reason: str, *, refused: bool = False) -> None:
        """Close the session for good. `refused`: the owner could not be reached."""
        if self.state is SessionState.GONE:
            return
        self.state = SessionState.GONE
        self._hang_up()
        self._directory.ended(self._key, reason if refused else None)
        self._events.on_gone(reason)


Welcome = Callable[[Sequence[int]], None]
"""Lets a client in; on one host, descriptors may be sent with it."""


class OwnerEvents(Protocol):
    """The calls by which the owner's end of a session reports to the object that holds it."""

    def on_proven(self, identity: PeerIdentity, welcome: Welcome) -> None:
        """Fence what the proven client has named, then call `welcome`."""

    def on_frame(self, body: bytes) -> None:
        """Take a message of the client. Raises ProtocolError to end the session."""

    def close(self) -> None:
        """End the session: the client has gone, or broke the rules."""


class OwnerStream:
    """The stream of one client's session with us, from the handshake on."""

    def __init__(
        self,
        name: str,
        loop: IoLoop,
        sock: socket.socket,
        handshake: AcceptingSide,
        events: OwnerEvents,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Take over a connection of protocol `name`."""
        self.identity: PeerIdentity | None = None
        self._name = name
        self._handshake = handshake
        self._events = events
        self._whence = whence(sock)
        self._link = ControlLink(loop, sock, self._on_frame, self._on_end)
        self._timer = loop.call_later(handshake_s, self._on_silence)

    @property
    def closed(self) -> bool:
        """True if the stream has ended, at either end."""
        return self._link.closed

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame to the client, which has been welcomed."""
        assert self._handshake.channel is not None
        self._link.send(self._handshake.channel.sent.seal(body), descriptors)

    def _on_frame(self, body: bytes) -> None:
        if self._handshake.channel is not None:
            self._events.on_frame(bytes(self._handshake.channel.received.open(body)))
            return
        answer = self._handshake.step(body)
        self.identity = self._handshake.identity
        if self.identity is not None:
            self._timer.cancel()
            self._events.on_proven(self.identity, functools.partial(self._link.send, answer))
            return
        self._link.send(answer)
        if self._handshake.refusal is not None:
            _LOG.warning("%s peer refused: %s", self._name, self._handshake.refusal)
            audit(
                "proof_failed", proof="transfer", whence=self._whence,
                reason=self._handshake.refusal,
            )  # fmt: skip
            self._events.close()

    def _on_silence(self) -> None:
        _LOG.warning("%s peer dropped: no handshake in time", self._name)
        self._events.close()

    def _on_end(self, reason: str) -> None:
        if self.identity is None:
            _LOG.info("%s peer left before it proved itself: %s", self._name, reason)
        self._events.close()

    def hand_over(self) -> Channel:
        """Leave the socket of a client that has been welcomed to the caller, for other frames than
        these, and return their channel. Raises ProtocolError when the client did not wait for that.
        """
        self._link.hand_over()
        assert self._handshake.channel is not None
        return self._handshake.channel

    def close(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        self._link.close()
