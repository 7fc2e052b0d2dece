"""Frames of the TCP protocol: fixed headers and range lists, little-endian. Pure.

After the handshake the client sends requests and the owner answers them in order:

    WRITE  header, ranges, payload   ->  DONE | REFUSED reason
    READ   header, ranges            ->  DATA payload | REFUSED reason
    ASK    header, question          ->  TOLD answer, payload | REFUSED reason

Both directions are sealed (`frames`): a tag follows each head (header and ranges, or question),
each chunk of a payload, each reason and each answer. Where payloads are encrypted, questions,
answers and reasons are, too. A header is kind (1 byte), version (1), number of ranges (2), request
id (8), payload bytes (8) and an extra number (8): the grant of a WRITE, the bytes of a piece for an
ASK (0: it wants none), the bytes of the answer for a TOLD, else 0. A range is region, offset,
length (8 each). Handshake messages go before them, in the frames of `net.control_link`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.engine import MAX_QUESTION_BYTES, TransferOp

WIRE_VERSION = 3
WRITE, READ, DONE, DATA, REFUSED, ASK, TOLD = 1, 2, 3, 4, 5, 6, 7
_KINDS = frozenset((WRITE, READ, DONE, DATA, REFUSED, ASK, TOLD))
_HEADER = struct.Struct("<BBHQQQ")
HEADER_BYTES = _HEADER.size
_HEAD = struct.Struct("<BBHQQQQQQ")
RANGE_BYTES = 24
HEAD_BYTES = HEADER_BYTES + RANGE_BYTES
"""Header and first range, which are read in one go: no request is shorter."""
MAX_RANGES = 1024
MAX_REQUEST_BYTES = 2**30
MAX_REASON_BYTES = 1024


class Header(msgspec.Struct, frozen=True):
    """The kind of a frame and how much follows."""

    kind: int
    num_ranges: int
    request_id: int
    num_bytes: int
    """Bytes of payload (WRITE, DATA, TOLD), of memory asked for (READ), of the question (ASK), or
    of the reason (REFUSED).
    """
    grant: int = 0
    """The grant by which a WRITE may be made, the bytes of each piece that comes behind the answer
    to an ASK (0: none comes), or the bytes of the answer before the payload (TOLD).
    """


def pack_header(header: Header) -> bytes:
    """Return the bytes of a header."""
    return _HEADER.pack(
        header.kind, WIRE_VERSION, header.num_ranges, header.request_id, header.num_bytes,
        header.grant,
    )  # fmt: skip


def parse_header(data: memoryview, kinds: frozenset[int]) -> Header:
    """Return the header in `data`. Raises ProtocolError unless it is of `kinds` and in bounds."""
    kind, version, num_ranges, request_id, num_bytes, grant = _HEADER.unpack(data)
    if kind not in _KINDS or version != WIRE_VERSION:
        raise ProtocolError(f"these bytes are not a transfer frame: kind {kind}, version {version}")
    if kind not in kinds:
        raise ProtocolError(f"unexpected transfer frame of kind {kind}")
    if num_ranges > MAX_RANGES or num_bytes > MAX_REQUEST_BYTES:
        raise ProtocolError(
            f"a transfer frame is too large: {num_ranges} ranges, {num_bytes} bytes"
        )
    if kind == REFUSED and num_bytes > MAX_REASON_BYTES:
        raise ProtocolError(f"a refusal of {num_bytes} bytes is too long")
    if kind == ASK and not RANGE_BYTES <= num_bytes <= MAX_QUESTION_BYTES:
        raise ProtocolError(f"a question has {num_bytes} bytes, which is outside the limits")
    if kind == TOLD and not 0 < grant <= MAX_QUESTION_BYTES:
        raise ProtocolError(f"an answer has {grant} bytes, which is outside the limits")
    return Header(kind, num_ranges, request_id, num_bytes, grant)


def pack_ranges(pieces: Sequence[TransferOp]) -> bytes:
    """Return the remote ranges of `pieces` in wire format."""
    flat: list[int] = []
    for op in pieces:
        flat += (op.remote_region, op.remote_offset, op.num_bytes)
    return struct.pack(f"<{len(flat)}Q", *flat)


def parse_ranges(data: memoryview) -> list[tuple[int, int, int]]:
    """Return (region, offset, length) of each range."""
    flat = struct.unpack(f"<{len(data) // 8}Q", data)
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def pack_request(
    kind: int, request_id: int, pieces: Sequence[TransferOp], num_bytes: int, grant: int = 0
) -> bytes:
    """Return header and ranges of a READ or WRITE; a WRITE's payload follows."""
    if len(pieces) == 1:
        op = pieces[0]
        place = op.remote_region, op.remote_offset, op.num_bytes
        return _HEAD.pack(kind, WIRE_VERSION, 1, request_id, num_bytes, grant, *place)
    header = Header(kind, len(pieces), request_id, num_bytes, grant)
    return pack_header(header) + pack_ranges(pieces)


def pack_ask(request_id: int, question_bytes: int, piece_bytes: int) -> bytes:
    """Return the header of an ASK, behind which the question goes."""
    return pack_header(Header(ASK, 0, request_id, question_bytes, piece_bytes))


def pack_refusal(request_id: int, reason: str) -> tuple[bytes, bytes]:
    """Return header and reason of a REFUSED frame."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return pack_header(Header(REFUSED, 0, request_id, len(text))), text


AHEAD_BYTES = 2**16
"""Bytes of a long payload that go with the header, ahead of the rest, to wake the receiver."""


def is_long(num_bytes: int) -> bool:
    """Return whether the start of a payload is sent alone, so that the receiver wakes early. The
    sender then yields once before it sends the rest.
    """
    return num_bytes >= 4 * AHEAD_BYTES


def advance(views: list[memoryview], num_bytes: int) -> None:
    """Drop the first `num_bytes` of scattered memory, in place."""
    index = 0
    while num_bytes and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    del views[:index]
    if num_bytes:
        views[0] = views[0][num_bytes:]
