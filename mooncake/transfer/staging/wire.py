"""The messages of a staging control session, about windows on device memory. Pure.

A window is a slot of the owner's pinned host memory, lent to one client for one slice. To write,
the client opens a window, fills it by any protocol and sends `Land`; the owner answers when the
bytes lie in the device. To read, the owner fills the window before it grants it. Payload never
comes this way.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.codec import Codec

MAX_RANGES = 1024
ALTERED = "bytes were altered between window and peer"


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """Return the xxh3-64 of some bytes, never 0."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest() or 1


class AskRegion(msgspec.Struct, frozen=True, tag="region", array_like=True):
    """The client asks what a region is."""

    region_id: int


class RegionFacts(msgspec.Struct, frozen=True, tag="facts", array_like=True):
    """The owner's answer, valid for as long as the owner lives."""

    region_id: int
    device: str
    """"host" also if there is no such region: the protocols report that."""
    protocols: list[str]
    """Protocols whose hardware reaches the device by itself."""
    window_bytes: int
    checksums: bool = False
    """True if `Land` and `Granted` carry the checksums of what passes through windows."""


class Open(msgspec.Struct, frozen=True, tag="open", array_like=True):
    """The client asks for a window on these (offset, length) ranges, packed in a row."""

    ticket: int
    region_id: int
    ranges: list[tuple[int, int]]
    is_write: bool
    settled: bool
    """True if the owner need not wait for the device's own work again."""
    grant: int = 0
    """The grant by which a write may change the device's memory."""


class Granted(msgspec.Struct, frozen=True, tag="granted", array_like=True):
    """The owner lends the window: the bytes at `offset` of a region of host memory."""

    ticket: int
    region_id: int
    offset: int
    checksum: int = 0
    """The xxh3-64 of the bytes that are read from the window. 0: they are not compared."""
    grant: int = 0
    """The grant by which a write may fill the window."""


class Land(msgspec.Struct, frozen=True, tag="land", array_like=True):
    """The client has filled the window; the owner copies it to the device."""

    ticket: int
    checksum: int = 0
    """xxh3-64 of the bytes that the client has sent; 0: not to be compared."""


class Settle(msgspec.Struct, frozen=True, tag="settle", array_like=True):
    """The client's NIC is about to write to this region."""

    ticket: int
    region_id: int


class Flush(msgspec.Struct, frozen=True, tag="flush", array_like=True):
    """The client's NIC has written to this region."""

    ticket: int
    region_id: int


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The owner has done what was asked. A window that was landed belongs to it again."""

    ticket: int


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The owner refuses. If there was a window, the owner has it again."""

    ticket: int
    reason: str


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """The client gives a window back, however far the owner is with it. No answer comes."""

    ticket: int


Ask = AskRegion | Open | Land | Settle | Flush | Drop
Answer = RegionFacts | Granted | Done | Refused


def _check(message: Ask | Answer) -> None:
    if isinstance(message, Open):
        lengths = [length for _, length in message.ranges]
        if not 0 < len(lengths) <= MAX_RANGES or min(lengths) <= 0:
            raise ProtocolError(
                f"the peer asked for a window on {len(lengths)} ranges, not on 1 to {MAX_RANGES}"
            )
    elif isinstance(message, RegionFacts) and message.window_bytes < 1:
        raise ProtocolError(
            f"the peer offered windows of {message.window_bytes} bytes; a window has at least 1"
        )


CODEC: Codec[Ask, Answer] = Codec(Ask, Answer, "windows", _check)
