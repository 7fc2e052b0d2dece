"""The visitor's control stream to one owner: handshake, then questions and answers about RDMA.

Lives in the RDMA loop; what the answers mean is its peer's business.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from mooncake.base.errors import TransferError
from mooncake.transfer.backends import rdma_wire as wire
from mooncake.transfer.backends.control_link import ControlLink
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.handshake import Credentials


class SessionOwner(Protocol):
    """Who talks through a session."""

    engine_id: str
    address: tuple[str, int]

    def on_welcome(self) -> None:
        """The owner of the memory has proven itself; earlier sessions told of are over."""

    def on_answer(self, answer: wire.Answer) -> None:
        """An answer came. Raises ProtocolError to end the session."""

    def on_session_end(self, reason: str) -> None:
        """The stream broke; not called after `close`."""


class VisitorSession:
    """See the module."""

    def __init__(
        self,
        peer: SessionOwner,
        credentials: Credentials,
        fenced: Sequence[str],
        loop: IoLoop,
        connect_s: float,
    ) -> None:
        """Begin to connect. Raises TransferError when that cannot even begin."""
        self._peer = peer
        self._handshake = credentials.connect(peer.engine_id, fenced)
        self.connection_id = self._handshake.hello.connection_id
        family = socket.AF_INET6 if ":" in peer.address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            error = sock.connect_ex(peer.address)
        except OSError as failure:
            sock.close()
            raise TransferError(f"{peer.engine_id}: {failure}") from failure
        del error  # in progress; how it went is the stream's first event
        self._link = ControlLink(loop, sock, self._on_frame, self._on_end)
        self._timer = loop.call_later(connect_s, self._on_silence)
        self._link.send(self._handshake.first_message)

    def _on_silence(self) -> None:
        self._link.close()
        self._peer.on_session_end("the peer does not answer")

    def _on_end(self, reason: str) -> None:
        self._timer.cancel()
        self._peer.on_session_end(reason)

    def _on_frame(self, body: bytes) -> None:
        if self._handshake.done:
            self._peer.on_answer(wire.decode_answer(body))
            return
        answer = self._handshake.step(body)
        if answer is not None:
            self._link.send(answer)
        else:
            self._timer.cancel()
            self._peer.on_welcome()

    def send(self, ask: wire.Ask) -> None:
        """Say something to the owner."""
        self._link.send(wire.encode(ask))

    def close(self) -> None:
        """Hang up."""
        self._timer.cancel()
        self._link.close()
