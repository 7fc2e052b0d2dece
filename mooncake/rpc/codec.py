"""Encoding of messages: one byte of magic, one of version, then msgpack of the tagged union.

Stateless. No pickle; only the structs of `base.messages` can be decoded.
"""

from __future__ import annotations

import msgspec

from mooncake.base.any_message import AnyMessage
from mooncake.base.errors import ProtocolError
from mooncake.base.messages import PROTOCOL_VERSION

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest encoded message a channel carries; a 128k-token prompt takes 0.5 MiB."""

_MAGIC = 0x4D
_PREFIX = bytes((_MAGIC, PROTOCOL_VERSION))
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return `message` as bytes. Raises ProtocolError when a field cannot be encoded."""
    try:
        return _PREFIX + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def decode(data: bytes | memoryview) -> AnyMessage:
    """Return the message in `data`. Raises ProtocolError on malformed data or another version."""
    view = memoryview(data)
    if len(view) < 2 or view[0] != _MAGIC:
        raise ProtocolError(f"not a message of this protocol: {bytes(view[:8]).hex() or 'empty'}")
    if view[1] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {view[1]}, this side {PROTOCOL_VERSION}: "
            "run the same release on all workers"
        )
    try:
        message: AnyMessage = _DECODER.decode(view[2:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(view)} bytes: {error!s:.200}") from error
    return message
