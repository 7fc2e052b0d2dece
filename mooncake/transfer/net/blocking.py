"""Frames and handshakes on blocking sockets. A frame is a length (4 bytes, little-endian) and the
body, as on a `ControlLink`.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from mooncake.base.errors import Forbidden, ProtocolError

if TYPE_CHECKING:
    from mooncake.transfer.net.handshake import AcceptingSide, ConnectingSide

_LENGTH_BYTES = 4
_MAX_STEP_BYTES = 1 << 16
"""Longest message of a handshake."""


def send(sock: socket.socket, body: bytes) -> None:
    """Send one frame."""
    sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def receive(
    sock: socket.socket, most: int | None = None, until_s: float | None = None
) -> bytes | None:
    """Return the next body, or None if the other end has gone.

    Raises:
        TimeoutError: the frame was not complete at `until_s`, by the monotonic clock.
        ProtocolError: it has more than `most` bytes.
    """
    head = _exactly(sock, _LENGTH_BYTES, until_s)
    if head is None:
        return None
    count = int.from_bytes(head, "little")
    if most is not None and count > most:
        raise ProtocolError(f"the peer does not speak this protocol: a frame of {count} bytes")
    return _exactly(sock, count, until_s)


def shake_hands(sock: socket.socket, side: ConnectingSide, until_s: float) -> None:
    """Prove both ends to each other.

    Raises:
        OSError, EOFError: the owner hung up, or the handshake was not done at `until_s`.
        MooncakeError: one side refuses the other, or the owner speaks another protocol.
    """
    answer: bytes | None = side.first_message
    while answer is not None:
        send(sock, answer)
        answer = side.step(_step(sock, until_s))


def let_in(sock: socket.socket, side: AcceptingSide, until_s: float) -> None:
    """Prove both ends to each other, at the end that was connected to.

    Raises:
        OSError, EOFError: the client hung up, or the handshake was not done at `until_s`.
        Forbidden: the client was refused, and told why.
        ProtocolError: it speaks another protocol.
    """
    while side.channel is None:
        send(sock, side.step(_step(sock, until_s)))
        if side.refusal is not None:
            raise Forbidden(f"a peer was refused: {side.refusal}")


def _step(sock: socket.socket, until_s: float) -> bytes:
    """Return the next message of a handshake. Raises EOFError when the other end has gone."""
    body = receive(sock, _MAX_STEP_BYTES, until_s)
    if body is None:
        raise EOFError("the peer hung up")
    return body


def _exactly(sock: socket.socket, count: int, until_s: float | None) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
        part = sock.recv(count - len(found))
        if not part:
            return None
        found += part
    return bytes(found)
