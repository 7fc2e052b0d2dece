"""Frames of the TCP protocol: what is packed is parsed, what is out of bounds is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base.errors import ProtocolError
from mooncake.transfer.engine import MAX_QUESTION_BYTES, TransferOp
from mooncake.transfer.tcp import wire

ALL = frozenset((
    wire.WRITE, wire.READ, wire.DONE, wire.DATA, wire.REFUSED, wire.ASK, wire.TOLD
))  # fmt: skip


def test_a_request_is_its_header_and_its_ranges() -> None:
    pieces = [TransferOp(9, 9, 7, 2**40, 5), TransferOp(9, 9, 8, 0, 2**29)]
    data = memoryview(wire.pack_request(wire.WRITE, 2**50, pieces, 2**29 + 5))
    header = wire.parse_header(data[: wire.HEADER_BYTES], ALL)
    assert header == wire.Header(wire.WRITE, 2, 2**50, 2**29 + 5)
    ranges = wire.parse_ranges(data[wire.HEADER_BYTES :])
    assert ranges == [(7, 2**40, 5), (8, 0, 2**29)]
    assert len(data) == wire.HEADER_BYTES + 2 * wire.RANGE_BYTES


def test_the_header_of_a_question_has_its_length() -> None:
    data = memoryview(wire.pack_ask(2**50, 300, 2**20))
    header = wire.parse_header(data[: wire.HEADER_BYTES], ALL)
    assert header == wire.Header(wire.ASK, 0, 2**50, 300, 2**20)
    assert len(data) == wire.HEADER_BYTES


@given(
    st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES), st.sampled_from(sorted(ALL))
)
def test_any_header_is_refused_or_in_bounds(data: bytes, kind: int) -> None:
    data = bytes([kind, wire.WIRE_VERSION]) + data[2:]
    try:
        header = wire.parse_header(memoryview(data), ALL)
    except ProtocolError:
        return
    assert header.num_ranges <= wire.MAX_RANGES
    assert header.num_bytes <= wire.MAX_REQUEST_BYTES
    if kind == wire.ASK:
        assert wire.RANGE_BYTES <= header.num_bytes <= MAX_QUESTION_BYTES
    if kind == wire.TOLD:
        assert 0 < header.grant <= MAX_QUESTION_BYTES


def test_a_refusal_carries_a_bounded_reason() -> None:
    data, reason = wire.pack_refusal(3, "no" * 5000)
    header = wire.parse_header(memoryview(data), ALL)
    assert (header.kind, header.request_id) == (wire.REFUSED, 3)
    assert header.num_bytes == len(reason) == wire.MAX_REASON_BYTES


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (wire.Header(wire.DATA, 0, 1, wire.MAX_REQUEST_BYTES + 1), "too large"),
        (wire.Header(wire.READ, wire.MAX_RANGES + 1, 1, 1), "too large"),
        (wire.Header(wire.REFUSED, 0, 1, wire.MAX_REASON_BYTES + 1), "too long"),
        (wire.Header(wire.ASK, 0, 1, wire.RANGE_BYTES - 1, 1), "a question has 23 bytes"),
        (wire.Header(wire.ASK, 0, 1, MAX_QUESTION_BYTES + 1, 1), "a question has 65537 bytes"),
        (wire.Header(wire.TOLD, 0, 1, 0, 0), "an answer has 0 bytes"),
        (wire.Header(wire.TOLD, 0, 1, 0, MAX_QUESTION_BYTES + 1), "an answer has 65537 bytes"),
        (wire.Header(99, 0, 1, 1), "not a transfer frame"),
    ],
)
def test_headers_out_of_bounds_are_refused(header: wire.Header, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        wire.parse_header(memoryview(wire.pack_header(header)), ALL)


def test_another_version_or_an_unexpected_kind_is_refused() -> None:
    data = bytearray(wire.pack_header(wire.Header(wire.DONE, 0, 1, 0)))
    with pytest.raises(ProtocolError, match="unexpected transfer frame of kind 3"):
        wire.parse_header(memoryview(data), frozenset((wire.READ, wire.WRITE)))
    data[1] += 1
    with pytest.raises(ProtocolError, match=f"version {wire.WIRE_VERSION + 1}"):
        wire.parse_header(memoryview(data), ALL)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 10])
def test_advance_walks_over_scattered_memory(step: int) -> None:
    whole = bytes(range(10))
    views = [memoryview(whole)[0:1], memoryview(whole)[1:4], memoryview(whole)[4:10]]
    for done in range(step, 11, step):
        wire.advance(views, step)
        assert b"".join(views) == whole[done:]
        assert all(views)
