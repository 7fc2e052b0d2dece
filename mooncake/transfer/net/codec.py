"""Encodes and decodes what two engines write to each other; malformed data is refused. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from mooncake.base.errors import ProtocolError

Message = TypeVar("Message")
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
_ENCODER = msgspec.msgpack.Encoder()


def decode(
    decoder: msgspec.msgpack.Decoder[Message], data: bytes | memoryview, subject: str
) -> Message:
    """Return the message in `data`. Raises ProtocolError, which names the `subject`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the {subject} is malformed: {error!s:.200}") from error


class Codec(Generic[Ask, Answer]):
    """The messages of one control stream: clients ask, the owner of the memory answers."""

    def __init__(
        self,
        asks: Any,
        answers: Any,
        subject: str,
        check: Callable[[Ask | Answer], None] = lambda _message: None,
    ) -> None:
        """Decode messages of the unions `asks` and `answers`.

        check: raises ProtocolError for values that the types allow and the protocol does not.
        """
        self._asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(asks)
        self._answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(answers)
        self._subject = subject
        self._check = check

    def encode(self, message: Ask | Answer) -> bytes:
        """Return a message as the body of one frame."""
        return _ENCODER.encode(message)

    def decode_ask(self, data: bytes | memoryview) -> Ask:
        """Return a client's message. Raises ProtocolError."""
        ask = decode(self._asks, data, f"request about {self._subject}")
        self._check(ask)
        return ask

    def decode_answer(self, data: bytes | memoryview) -> Answer:
        """Return an owner's message. Raises ProtocolError."""
        answer = decode(self._answers, data, f"answer about {self._subject}")
        self._check(answer)
        return answer
