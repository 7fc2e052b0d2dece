"""The visitor's control stream to one owner: handshake, then questions and answers.

Lives in an I/O loop; what the answers mean is its peer's business, how they are written its codec's
(`rdma_wire`, `staging.wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from mooncake.base.errors import TransferError
from mooncake.transfer.backends.control_link import ControlLink, begin_to_connect
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.handshake import Credentials

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Ask_contra = TypeVar("Ask_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
Answer_contra = TypeVar("Answer_contra", contravariant=True)


class Codec(Protocol[Ask_contra, Answer_co]):
    """How frames are written and read."""

    def encode(self, message: Ask_contra, /) -> bytes: ...

    def decode_answer(self, data: bytes, /) -> Answer_co:
        """Raises ProtocolError."""


class SessionOwner(Protocol[Answer_contra]):
    """Who talks through a session."""

    engine_id: str
    address: tuple[str, int]

    def on_welcome(self) -> None:
        """The owner of the memory has proven itself; earlier sessions told of are over."""

    def on_answer(self, answer: Answer_contra, /) -> None:
        """An answer came. Raises ProtocolError to end the session."""

    def on_session_end(self, reason: str) -> None:
        """The stream broke; not called after `close`."""


class VisitorSession(Generic[Ask, Answer]):
    """See the module."""

    def __init__(
        self,
        peer: SessionOwner[Answer],
        credentials: Credentials,
        fenced: Sequence[str],
        loop: IoLoop,
        connect_s: float,
        codec: Codec[Ask, Answer],
    ) -> None:
        """Begin to connect. Raises TransferError when that cannot even begin."""
        self._peer = peer
        self._codec = codec
        self._handshake = credentials.connect(peer.engine_id, fenced)
        self.connection_id = self._handshake.hello.connection_id
        try:
            sock = begin_to_connect(peer.address)
        except OSError as failure:
            raise TransferError(f"{peer.engine_id}: {failure}") from failure
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
            self._peer.on_answer(self._codec.decode_answer(body))
            return
        answer = self._handshake.step(body)
        if answer is not None:
            self._link.send(answer)
        else:
            self._timer.cancel()
            self._peer.on_welcome()

    def send(self, ask: Ask) -> None:
        """Say something to the owner."""
        self._link.send(self._codec.encode(ask))

    def close(self) -> None:
        """Hang up."""
        self._timer.cancel()
        self._link.close()
