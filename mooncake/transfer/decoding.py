"""What a peer sent, as a message or refused: the one way all control streams read. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from mooncake.base.errors import ProtocolError

Message = TypeVar("Message")


def decode(
    decoder: msgspec.msgpack.Decoder[Message], data: bytes | memoryview, what: str
) -> Message:
    """Return the message in `data`. Raises ProtocolError: a malformed `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {what}: {error}") from error
