"""Encoding of messages: one byte of magic, one of version, the sender's certificate behind its
length, then msgpack of the tagged union.

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
_HEAD_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def head_of(certificate: bytes) -> bytes:
    """Return what begins all messages of the holder of `certificate`."""
    return _PREFIX + len(certificate).to_bytes(2, "little") + certificate


NO_CERTIFICATE = head_of(b"")
"""Begins messages inside one process, where all are who they are."""


def encode(message: AnyMessage, head: bytes = NO_CERTIFICATE) -> bytes:
    """Return `message` as bytes behind `head`. Raises ProtocolError when it cannot be."""
    try:
        return head + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def certificate_of(data: bytes | memoryview) -> bytes:
    """Return the certificate that `data` begins with. Raises ProtocolError on malformed data or
    another version.
    """
    if len(data) < _HEAD_BYTES or data[0] != _MAGIC:
        raise ProtocolError(f"not a message of this protocol: {data[:8].hex() or 'empty'}")
    if data[1] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {data[1]}, this side {PROTOCOL_VERSION}: "
            "run the same release on all workers"
        )
    return bytes(data[_HEAD_BYTES : _HEAD_BYTES + int.from_bytes(data[2:_HEAD_BYTES], "little")])


def decode(data: bytes | memoryview, num_head_bytes: int | None = None) -> AnyMessage:
    """Return the message in `data`. Raises ProtocolError on malformed data or another version.

    num_head_bytes: of its head, which the caller has compared with one that it knows.
    """
    start = num_head_bytes or _HEAD_BYTES + len(certificate_of(data))
    try:
        message: AnyMessage = _DECODER.decode(memoryview(data)[start:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(data)} bytes: {error!s:.200}") from error
    return message
