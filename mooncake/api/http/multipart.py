"""Splits a body of `multipart/form-data` while it arrives, in memory for its heads only. No state
but the place in one body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mooncake.base import InvalidRequest

MAX_HEAD_BYTES = 8192
MAX_PARTS = 32
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_ESCAPED = re.compile(r"\\(.)")
_SPACES = b" \t"


class Head(NamedTuple):
    """The beginning of a field. `filename` is None if it is no file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> str | None:
    """Return the boundary of a `Content-Type`; None if it is no form of several parts, or has none
    that is valid.
    """
    media, *parameters = content_type.split(";")
    if media.strip().lower() != "multipart/form-data":
        return None
    for each in parameters:
        name, _, value = each.strip().partition("=")
        value = value.strip('"')
        if name.lower() == "boundary" and _BOUNDARY.fullmatch(value):
            return value
    return None


class FormSplitter:
    """Splits one body, cut anywhere, into heads and the bytes that follow each."""

    def __init__(self, boundary: str) -> None:
        self._delimiter = b"\r\n--" + boundary.encode("ascii")
        self._rest = b"\r\n"  # the first delimiter need not begin a line
        self._step: Callable[[], tuple[Head | bytes, bool]] = self._skip
        self._num_parts = 0
        self.ended = False
        """True once the last delimiter has come; what follows it is ignored."""

    def feed(self, piece: bytes) -> Iterator[Head | bytes]:
        """Add the next piece and yield what it completes.

        Raises:
            InvalidRequest: it is no form, or has too many fields or too long heads.
        """
        self._rest += piece
        while not self.ended:
            found, goes_on = self._step()
            if found:
                yield found
            if not goes_on:
                return
        self._rest = b""

    def _skip(self) -> tuple[Head | bytes, bool]:
        """Drop what comes before the first delimiter."""
        return b"", self._data()[1]

    def _data(self) -> tuple[Head | bytes, bool]:
        """Return what belongs to the field for certain."""
        found = self._rest.find(self._delimiter)
        if found < 0:
            kept = len(self._delimiter) - 1
            data, self._rest = self._rest[:-kept], self._rest[-kept:]
            return data, False
        data, self._rest = self._rest[:found], self._rest[found + len(self._delimiter) :]
        self._step = self._after_delimiter
        return data, True

    def _after_delimiter(self) -> tuple[Head | bytes, bool]:
        if len(self._rest) < 2:
            return b"", False
        if self._rest.startswith(b"--"):
            self.ended = True
            return b"", True
        line, newline, rest = self._rest.partition(b"\r\n")
        if line.strip(_SPACES) not in (b"", b"\r") or len(line) > MAX_HEAD_BYTES:
            raise InvalidRequest("the form is not valid: a boundary is not followed by a new line")
        if not newline:
            return b"", False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} fields")
        self._rest = b"\r\n" + rest
        self._step = self._head
        return b"", True

    def _head(self) -> tuple[Head | bytes, bool]:
        end = self._rest.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._rest) >= MAX_HEAD_BYTES:
                raise InvalidRequest(f"a field of the form has over {MAX_HEAD_BYTES} bytes of head")
            return b"", False
        text, self._rest = self._rest[:end], self._rest[end + 4 :]
        self._step = self._data
        return _head_of(text.decode("utf-8", "replace")), True


def _head_of(text: str) -> Head:
    """Return what the headers of a field say."""
    for line in text.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        found = {
            each[1].lower(): _ESCAPED.sub(r"\1", each[2]) if each[3] is None else each[3]
            for each in _PARAMETER.finditer(value)
        }
        if value.split(";")[0].strip().lower() == "form-data" and "name" in found:
            return Head(found["name"], found.get("filename"))
    raise InvalidRequest(
        "a field of the form has no name: send 'Content-Disposition: form-data; name=\"…\"'"
    )
