"""Encodes messages: one byte of magic, one of the frame's version, the length of the sender's
certificate and the certificate, then msgpack of the tagged union. The meaning of messages has its
own versions, on which processes agree when they join (`messages.Release`).

Stateless. No pickle; only the structs of `base.messages` can be decoded.
"""

from __future__ import annotations

import msgspec

from mooncake import __version__
from mooncake.base.errors import ProtocolError
from mooncake.base.messages import WorkerRef
from mooncake.base.pool_messages import AnyMessage

MAX_MESSAGE_BYTES = 64 * 2**20
"""Longest encoded message a channel carries; a 128k-token prompt takes 0.5 MiB."""

_MAGIC = 0x4D
FRAME_VERSION = 6
"""Version of the frame. A process with another version cannot read any message."""
_PREFIX = bytes((_MAGIC, FRAME_VERSION))
_HEAD_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
_KINDS = frozenset(kind.__struct_config__.tag for kind in AnyMessage.__args__)


class _Unknown(msgspec.Struct):
    """The fields that are read of a message that only a later release knows."""

    type: str
    asker: WorkerRef | None = None
    reader: WorkerRef | None = None
    writer: WorkerRef | None = None
    ticket: int = 0


_UNKNOWN = msgspec.msgpack.Decoder(_Unknown)


class UnknownMessage(ProtocolError):
    """A well-formed message of a kind that this release does not have."""

    def __init__(self, kind: str, asker: WorkerRef | None, ticket: int) -> None:
        """Name the process that waits for an answer to `ticket` as `asker`; None: nobody waits."""
        super().__init__(f"release {__version__} has no message of the kind {kind:.40}")
        self.kind = kind
        self.asker = asker
        self.ticket = ticket


def head_of(certificate: bytes) -> bytes:
    """Return the bytes with which all messages of the holder of `certificate` begin."""
    return _PREFIX + len(certificate).to_bytes(2, "little") + certificate


NO_CERTIFICATE = head_of(b"")
"""Begins messages inside one process, where no sender has to prove who it is."""


def encode(message: AnyMessage, head: bytes = NO_CERTIFICATE) -> bytes:
    """Return `message` as bytes behind `head`. Raises ProtocolError when the message has no
    encoding.
    """
    try:
        return head + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error


def certificate_of(data: bytes | memoryview) -> bytes:
    """Return the certificate that `data` begins with. Raises ProtocolError on malformed data or
    another version.
    """
    if len(data) < _HEAD_BYTES or data[0] != _MAGIC:
        raise ProtocolError(
            f"the bytes are not a message of this protocol: {data[:8].hex() or 'empty'}"
        )
    if data[1] != FRAME_VERSION:
        raise ProtocolError(
            f"the peer frames messages in version {data[1]}, and this release ({__version__}) in "
            f"version {FRAME_VERSION}; run the same release on all workers"
        )
    return bytes(data[_HEAD_BYTES : _HEAD_BYTES + int.from_bytes(data[2:_HEAD_BYTES], "little")])


def decode(data: bytes | memoryview, num_head_bytes: int | None = None) -> AnyMessage:
    """Return the message in `data`. Raises ProtocolError on malformed data or another version, and
    UnknownMessage, which is a ProtocolError, for a message that only another release knows.

    num_head_bytes: the length of the message's head, if the caller knows this head already.
    """
    start = num_head_bytes or _HEAD_BYTES + len(certificate_of(data))
    try:
        message: AnyMessage = _DECODER.decode(memoryview(data)[start:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _check_kind(memoryview(data)[start:])
        raise ProtocolError(
            f"a message of {len(data)} bytes is malformed: {error!s:.200}"
        ) from error
    return message


def _check_kind(body: memoryview) -> None:
    """Raise UnknownMessage when `body` is well formed and of an unknown kind."""
    try:
        found = _UNKNOWN.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if found.type not in _KINDS:
        asker = found.asker or found.reader or found.writer
        raise UnknownMessage(found.type, asker, found.ticket)
