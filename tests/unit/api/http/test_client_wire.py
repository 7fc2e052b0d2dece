"""HTTP and events as bytes: the same meaning however the bytes are cut, and clear refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.http.client_wire import (
    MAX_HEAD_BYTES,
    EventSplitter,
    ResponseReader,
    WireError,
    request_head,
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;name=value\r\n, \r\nyou\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\nConnection: close\r\n\r\ngone"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(reader.feed(piece) for piece in pieces)


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_chunked_body_is_the_same_however_it_is_cut(places: list[int]) -> None:
    reader, body = read(cut(CHUNKED, places))
    assert (reader.status, reader.reason, body) == (200, "OK", b"hello, \r\nyou")
    assert reader.done
    assert reader.keep_alive


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_sized_body_is_the_same_however_it_is_cut(places: list[int]) -> None:
    reader, body = read(cut(SIZED, places))
    assert (reader.status, reader.reason, body) == (404, "Not Found", b"gone")
    assert reader.done
    assert not reader.keep_alive


def test_each_byte_of_a_chunk_is_passed_on_at_once() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n")
    assert [reader.feed(b"a"), reader.feed(b"b"), reader.feed(b"c\r")] == [b"a", b"b", b"c"]
    assert not reader.done


def test_body_without_length_ends_with_the_connection() -> None:
    reader, body = read([b"HTTP/1.1 200 OK\r\n\r\n", b"all of", b" it"])
    assert (body, reader.done) == (b"all of it", False)
    assert reader.end()
    assert reader.done
    assert not reader.keep_alive


@pytest.mark.parametrize("length", range(len(CHUNKED)))
def test_answer_that_breaks_off_is_not_whole(length: int) -> None:
    reader, _ = read([CHUNKED[:length]])
    assert not reader.end()


def test_interim_answers_are_passed_over() -> None:
    reader, body = read([b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + SIZED])
    assert (reader.status, body) == (404, b"gone")
    assert reader.headers == {"content-length": "4", "connection": "close"}


def test_headers_behind_the_body_are_ignored() -> None:
    reader, _ = read([CHUNKED.replace(b"\r\n0\r\n\r\n", b"\r\n0\r\nAfter: z\r\n\r\n")])
    assert reader.done
    assert reader.headers == {
        "content-type": "text/event-stream", "transfer-encoding": "chunked",
    }  # fmt: skip


def test_answer_without_a_body_is_done_with_its_head() -> None:
    reader, body = read([b"HTTP/1.1 204 No Content\r\n\r\n"])
    assert (reader.done, body) == (True, b"")


def test_old_servers_close_unless_they_say_otherwise() -> None:
    closing, _ = read([b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"])
    keeping, _ = read([b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n\r\n"])
    assert (closing.keep_alive, keeping.keep_alive) == (False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        SIZED + b"more",
        CHUNKED[:-5].replace(b"5\r\nhello", b"4\r\nhello"),
        CHUNKED.replace(b"5\r\nhello", b"x\r\nhello"),
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\nhello",
        b"x" * (MAX_HEAD_BYTES + 1),
        CHUNKED[: CHUNKED.index(b"hello")] + b"hello\r\n" + b"1" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read([data])


def test_started_tells_a_stale_connection_from_a_broken_answer() -> None:
    reader = ResponseReader()
    assert not reader.started
    reader.feed(b"H")
    assert reader.started


def test_request_head() -> None:
    head = request_head("POST", "/v1/x", "h:1", {"A": "b"}, 7)
    assert head == b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\nContent-Length: 7\r\nA: b\r\n\r\n"


EVENTS = 'data: {"a": 1}\n\n: a comment\n\ndata:no space\n\nid: 3\ndata: two\ndata: lines\n\n'
EXPECTED = [b'{"a": 1}', b"no space", b"two\nlines"]


@given(st.lists(st.integers(0, 1000), max_size=20), st.booleans())
def test_events_are_the_same_however_they_are_cut(places: list[int], crlf: bool) -> None:
    data = (EVENTS.replace("\n", "\r\n") if crlf else EVENTS).encode()
    splitter = EventSplitter()
    assert [event for piece in cut(data, places) for event in splitter.feed(piece)] == EXPECTED


def test_unfinished_event_is_held_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: b") == [b"a"]
    assert splitter.feed(b"\n\n") == [b"b"]
