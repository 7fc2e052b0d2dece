"""What two engines say to each other about windows on device memory, over their control stream.
Pure.

A window is a slot of the owner's pinned host memory, lent to one visitor for one slice. To write,
the visitor opens one, fills it by any protocol and says `Land`; the owner answers when the bytes
lie in the device. To read, the owner fills the window before it grants it. Payload never comes
this way.
"""

from __future__ import annotations

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.decoding import decode

MAX_RANGES = 1024


class AskRegion(msgspec.Struct, frozen=True, tag="region", array_like=True):
    """Visitor: what is this region of yours?"""

    region_id: int


class RegionFacts(msgspec.Struct, frozen=True, tag="facts", array_like=True):
    """Owner: this, for as long as I live."""

    region_id: int
    device: str
    """"host" also where there is no such region: then the protocols say so."""
    protocols: list[str]
    """Those whose hardware reaches the device by itself."""
    window_bytes: int


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """Visitor: lend me a window on these ranges, one after another."""

    ticket: int
    region_id: int
    ranges: list[tuple[int, int]]
    is_write: bool
    settled: bool
    """The owner need not wait for the device's own work again."""


class Granted(msgspec.Struct, frozen=True, tag="granted", array_like=True):
    """Owner: it is there."""

    ticket: int
    region_id: int
    offset: int


class Land(msgspec.Struct, frozen=True, tag="land", array_like=True):
    """Visitor: the window is full, bring it to the device."""

    ticket: int


class Settle(msgspec.Struct, frozen=True, tag="settle", array_like=True):
    """Visitor: my NIC is about to write to this region."""

    ticket: int
    region_id: int


class Flush(msgspec.Struct, frozen=True, tag="flush", array_like=True):
    """Visitor: my NIC has written to this region."""

    ticket: int
    region_id: int


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Owner: the window's bytes lie in the device and it is mine again; or what was asked is so."""

    ticket: int


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """Owner: no; there is no such window (any more)."""

    ticket: int
    reason: str


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """Visitor: I touch this window no more, wherever you are with it."""

    ticket: int


Ask = AskRegion | Open | Land | Settle | Flush | Drop
Answer = RegionFacts | Granted | Done | Refused
_ASK: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Ask | Answer) -> bytes:
    """Return a message as the body of one frame."""
    return _ENCODER.encode(message)


def decode_ask(data: bytes | memoryview) -> Ask:
    """Return a visitor's message. Raises ProtocolError."""
    ask = decode(_ASK, data, "request about windows")
    if isinstance(ask, Open) and not (
        0 < len(ask.ranges) <= MAX_RANGES and all(length > 0 for _, length in ask.ranges)
    ):
        raise ProtocolError(f"a window on {len(ask.ranges)} ranges")
    return ask


def decode_answer(data: bytes | memoryview) -> Answer:
    """Return an owner's message. Raises ProtocolError."""
    answer = decode(_ANSWER, data, "answer about windows")
    if isinstance(answer, RegionFacts) and answer.window_bytes < 1:
        raise ProtocolError(f"windows of {answer.window_bytes} bytes")
    return answer
