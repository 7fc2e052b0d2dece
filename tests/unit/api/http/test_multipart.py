"""Forms of several parts, cut anywhere: what is in them, what is refused, how much is held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.http.request_body import (
    MAX_HEAD_BYTES,
    MAX_PARTS,
    FormSplitter,
    Head,
    boundary_of,
)
from mooncake.base import InvalidRequest


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = [b"--X\r\nContent-Disposition: " + head.encode() + b"\r\n\r\n" + body + b"\r\n"
             for head, body in fields]  # fmt: skip
    return b"".join(parts) + b"--X--\r\n"


def split(body: bytes, step: int = 10**9, *, whole: bool = True) -> list[tuple[Head, bytes]]:
    splitter, found = FormSplitter("X"), list[tuple[Head, bytes]]()
    for at in range(0, len(body), step):
        for part in splitter.feed(body[at : at + step]):
            if isinstance(part, Head):
                found.append((part, b""))
            else:
                head, before = found.pop()
                found.append((head, before + part))
    assert splitter.ended is whole
    return found


def test_a_form_is_split_wherever_it_is_cut() -> None:
    text = b"{}\r\n--Y\r\n-X is text\n"
    body = form(
        ('form-data; name="purpose"', b"batch"),
        ('form-data; name="file"; filename="a \\"b\\".jsonl"', text),
    )
    for step in range(1, len(body) + 1):
        assert split(body, step) == [
            (Head("purpose", None), b"batch"),
            (Head("file", 'a "b".jsonl'), text),
        ]


def test_empty_fields_and_a_preamble_are_taken() -> None:
    body = b"hello\r\n" + form(("form-data; name=a", b""), ('form-data; NAME="b"', b"\r\n"))
    for step in (1, 3, 10**9):
        assert split(body, step) == [(Head("a", None), b""), (Head("b", None), b"\r\n")]
    assert split(b"--X--") == []


def test_what_follows_the_end_is_ignored() -> None:
    body = form(("form-data; name=a", b"1"))
    assert split(body + body) == [(Head("a", None), b"1")]


def test_a_form_that_is_cut_short_has_not_ended() -> None:
    body = form(("form-data; name=a", b"1"))
    for end in range(len(body) - 4):
        split(body[:end], whole=False)


@pytest.mark.parametrize(
    "body",
    [
        b"--X\r\n\r\nno head",
        b"--X\r\nContent-Type: a\r\n\r\nno name",
        b"--X\r\nContent-Disposition: attachment; name=a\r\n\r\n",
        b"--X rest of a line\r\n",
        b"--X\r\n" + b"a" * MAX_HEAD_BYTES,
        form(*[("form-data; name=a", b"")] * (MAX_PARTS + 1)),
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    for step in (1, 10**9):
        with pytest.raises(InvalidRequest):
            split(body, step)


def test_memory_holds_no_more_than_a_head() -> None:
    splitter = FormSplitter("X")
    list(splitter.feed(b"--X\r\nContent-Disposition: form-data; name=a\r\n\r\n"))
    for _ in range(100):
        assert sum(len(part) for part in splitter.feed(b"\r\n--" * 250)) > 900
        assert len(splitter._rest) < 10


@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(1, 12))
def test_any_bytes_come_back(contents: list[bytes], step: int) -> None:
    contents = [each.replace(b"--X", b"") for each in contents]
    contents = [each for each in contents if b"--X" not in each]
    fields = [(f"form-data; name=f{at}", each) for at, each in enumerate(contents)]
    assert split(form(*fields), step) == [
        (Head(f"f{at}", None), each) for at, each in enumerate(contents)
    ]


@pytest.mark.parametrize(
    ("given", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('Multipart/Form-Data; charset=x; Boundary="a b:c"', "a b:c"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/form-data; boundary=" + "a" * 71, None),
        ("multipart/form-data; boundary=\u00e4", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json", None),
        ("", None),
    ],
)
def test_boundaries(given: str, boundary: str | None) -> None:
    assert boundary_of(given) == boundary
