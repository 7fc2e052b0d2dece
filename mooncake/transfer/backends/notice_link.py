"""Carries notices between processes: a stream for each pair of engines that has something to say,
whatever protocol moves their bytes.

Both sides live in one I/O loop. Peers prove the cluster secret as on any transfer connection.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable

from mooncake.base.errors import ConfigError
from mooncake.transfer.backends.control_link import ControlLink, begin_to_connect
from mooncake.transfer.backends.io_loop import IoLoop, Timer
from mooncake.transfer.backends.listener import Listener, tcp_listener
from mooncake.transfer.backends.tcp import TcpSettings, parse_endpoint
from mooncake.transfer.handshake import AcceptingSide, ConnectingSide, Credentials
from mooncake.transfer.notices import (
    Ear,
    Outbox,
    decode_answer,
    decode_words,
    encode,
)

_LOG = logging.getLogger(__name__)
_HANDSHAKE_S = 5.0
ANSWER_S = 5.0
"""A peer that does not answer within this time, over whichever connections, is given up."""
_MAX_SESSIONS = 4096
_MAX_CONNECTIONS = 3
"""Tried in a row for the same words."""
_MANY_SPEAKERS = 256


class NoticeLinks:
    """The `Links` of one engine, and where its peers reach it."""

    def __init__(
        self, credentials: Credentials, loop: IoLoop, ear: Ear, settings: TcpSettings
    ) -> None:
        """Listen on a free port. Raises ConfigError when the host cannot be bound."""
        self.loop = loop
        self.ear = ear
        self._credentials = credentials
        self._host = settings.advertise_host or settings.bind_host
        self._speakers: dict[str, _Speaker] = {}
        self._sessions: set[_Session] = set()
        self._closed = False
        sock = tcp_listener(settings.bind_host)
        self._port: int = sock.getsockname()[1]
        self._listener = Listener(
            sock, loop, "notice", _MAX_SESSIONS, lambda: len(self._sessions), self._take
        )

    @property
    def endpoint(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def _take(self, sock: socket.socket) -> _Session:
        session = _Session(self, sock, self._credentials.accept())
        self._sessions.add(session)
        return session

    def fence(self, engine_id: str, connection_ids: tuple[str, ...]) -> None:
        """Hear nothing more of earlier connections of a peer."""
        for session in list(self._sessions):
            if session.is_one_of(engine_id, connection_ids):
                session.close()

    def forget(self, session: _Session) -> None:
        """A peer's connection has ended."""
        self._sessions.discard(session)

    def pump(self, outbox: Outbox, engine_id: str, endpoint: str) -> None:
        """See `Links`."""
        self.loop.post(functools.partial(self._pump, outbox, engine_id, endpoint))

    def _pump(self, outbox: Outbox, engine_id: str, endpoint: str) -> None:
        if self._closed:
            outbox.give_up("the transfer engine is closed")
            return
        speaker = self._speakers.get(engine_id)
        if speaker is None or speaker.outbox is not outbox:
            if speaker is not None:
                speaker.close("nothing was left to say")
            if len(self._speakers) >= _MANY_SPEAKERS:
                self._close_idle()
            try:
                address = parse_endpoint(endpoint)
            except ConfigError as error:
                outbox.give_up(error.message)
                return
            connect = functools.partial(self._credentials.connect, engine_id)
            speaker = self._speakers[engine_id] = _Speaker(self.loop, outbox, address, connect)
        speaker.pump()

    def _close_idle(self) -> None:
        for name, speaker in list(self._speakers.items()):
            if speaker.outbox.is_empty:
                speaker.close("not used lately")
                del self._speakers[name]

    def close(self) -> None:
        """See `Links`; done when the loop has ended."""
        self.loop.post(self._close)

    def _close(self) -> None:
        self._closed = True
        self._listener.close()
        for speaker in self._speakers.values():
            speaker.close("the transfer engine is closed")
        for session in list(self._sessions):
            session.close()


class _Speaker:
    """Our stream to one peer: opened when there is something to say, again when it breaks."""

    def __init__(
        self,
        loop: IoLoop,
        outbox: Outbox,
        address: tuple[str, int],
        connect: Callable[[list[str]], ConnectingSide],
    ) -> None:
        self.outbox = outbox
        self._loop = loop
        self._address = address
        self._connect = connect
        self._handshake: ConnectingSide | None = None
        self._link: ControlLink | None = None
        self._stale: list[str] = []
        """Connections we left while a word may have been under way."""
        self._num_connections = 0
        self._patience: Timer | None = None

    def pump(self) -> None:
        """Say what is due, unless an answer is awaited."""
        if self._link is None:
            if self.outbox.under_way is not None or self.outbox.is_due:
                self._open()
        elif self._handshake is not None and self._handshake.done:
            words = self.outbox.take()
            if words is not None:
                self._wait()
                self._link.send(encode(words))

    def _wait(self) -> None:
        self._stop_waiting()
        self._patience = self._loop.call_later(ANSWER_S, self._on_silence)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _open(self) -> None:
        self._num_connections += 1
        try:
            sock = begin_to_connect(self._address)
        except OSError as failure:
            self._give_up(str(failure))
            return
        if self._patience is None:
            self._wait()
        self._handshake = self._connect(self._stale)
        self._link = ControlLink(self._loop, sock, self._on_frame, self._on_end)
        self._link.send(self._handshake.first_message)

    def _on_frame(self, body: bytes) -> None:
        assert self._handshake is not None
        assert self._link is not None
        if self._handshake.done:
            self._stop_waiting()
            self._num_connections = 0
            self.outbox.answered(decode_answer(body))
            self.pump()
            return
        answer = self._handshake.step(body)
        if answer is not None:
            self._link.send(answer)
            return
        self._stale = []
        words = self.outbox.under_way
        if words is not None:
            self._link.send(encode(words))
        else:
            self._stop_waiting()
            self.pump()

    def _on_end(self, reason: str) -> None:
        is_refusal = self._handshake is None or not self._handshake.done
        self._drop()
        if is_refusal or self._num_connections >= _MAX_CONNECTIONS:
            self._give_up(reason)
        else:
            self.pump()

    def _on_silence(self) -> None:
        self._give_up("it does not answer")

    def _drop(self) -> None:
        """Let go of the stream, and have the peer forget what of it it has not read."""
        if self._link is not None:
            self._link.abort()
            if self._handshake is not None and self.outbox.under_way is not None:
                self._stale = [*self._stale, self._handshake.hello.connection_id][-8:]
        self._link = self._handshake = None

    def _give_up(self, reason: str) -> None:
        self._drop()
        self._stop_waiting()
        self._num_connections = 0
        self.outbox.give_up(reason)

    def close(self, reason: str) -> None:
        """Hang up; what is under way stays unconfirmed."""
        self._give_up(reason)


class _Session:
    """A peer's stream to us."""

    def __init__(self, links: NoticeLinks, sock: socket.socket, handshake: AcceptingSide) -> None:
        self._links = links
        self._handshake = handshake
        self._link = ControlLink(links.loop, sock, self._on_frame, self._on_end)
        self._timer = links.loop.call_later(_HANDSHAKE_S, self.close)

    @property
    def is_stranger(self) -> bool:
        return self._handshake.identity is None and not self._link.closed

    def is_one_of(self, engine_id: str, connection_ids: tuple[str, ...]) -> bool:
        """Whether this is one of a peer's named connections."""
        known = self._handshake.identity
        return (
            known is not None
            and known.engine_id == engine_id
            and known.connection_id in connection_ids
        )

    def _on_frame(self, body: bytes) -> None:
        identity = self._handshake.identity
        if identity is not None:
            answer = self._links.ear.hear(identity.engine_id, decode_words(body))
            self._link.send(encode(answer))
            return
        self._link.send(self._handshake.step(body))
        identity = self._handshake.identity
        if identity is not None:
            self._timer.cancel()
            self._links.fence(identity.engine_id, identity.fenced)
        elif self._handshake.refusal is not None:
            _LOG.warning("a peer with notices was refused: %s", self._handshake.refusal)
            self.close()

    def _on_end(self, reason: str) -> None:
        _LOG.debug("a peer's notices ended: %s", reason)
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._timer.cancel()
        self._link.close()
        self._links.forget(self)
