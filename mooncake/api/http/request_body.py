"""Reads the bodies of requests within the limits of `ApiConfig`, validates them and checks them
against what is served. Holds no state.

Parsing and validating hold Python's lock from the first byte to the last, so all streams stand
still meanwhile. The time depends on the number of values, and on the digits of long numbers, and
hardly on other bytes: one string of 32 MB takes 0.03 s, nested lists of 32 MB take more than 5 s.
So the cost is estimated while a body arrives. A body of `multipart/form-data` is split while it
arrives, in memory for its heads only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from mooncake.api.api_server import ApiServer
from mooncake.api.config import ApiConfig
from mooncake.api.errors import ApiError, validation_error
from mooncake.api.http.response import tenant_of, unless_gone
from mooncake.api.schema.fields import MAX_SESSION_CHARS, RequestBody, SharedFields
from mooncake.base import InvalidRequest

ITEM_COST = 1
"""Cost of a comma: one more number or string. About 0.1 µs."""
NODE_COST = 8
"""Cost of a colon or an opening bracket: a field, an object, a list. About 1 µs."""
DIGITS_COST = 40
"""Cost of `NUM_DIGITS` digits in a row. A whole number of 4,300 digits, the longest that parses,
takes 30 µs, and 0.3 ms where it becomes text again, as in a schema.
"""
NUM_DIGITS = 64
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
SESSION = "x-session-id"
"""The header that names a request's session, for bodies without `session_id`."""
Body = TypeVar("Body", bound=RequestBody)
TURN_BYTES = 1 << 18
"""After about this many bytes of a body, other requests get a turn."""
PIECE_CHARS = 1 << 16
"""JSON texts in strings are looked at in pieces of this size, as bodies arrive."""
MAX_COST_HERE = 1 << 14
"""The most costly body that is validated in the event loop: it takes a few milliseconds."""


class JsonCost:
    """Adds up the cost of a text that arrives in parts, cut anywhere.

    The sum is exact up to the first mistake in the text, where parsers stop.
    """

    def __init__(self) -> None:
        self.total = 0
        self._begin()

    def _begin(self) -> None:
        self._in_string = False
        self._rest = b""
        self._begun = b""
        """The last digits of the part before, which have not been counted."""

    def texts(self, texts: Iterable[str]) -> Iterator[int]:
        """Add JSON texts that were strings in the text before, piece by piece; yield the bytes of
        each piece.
        """
        for text in texts:
            self._begin()
            for start in range(0, len(text), PIECE_CHARS):
                piece = text[start : start + PIECE_CHARS].encode("utf-8", "surrogatepass")
                self.add(piece)
                yield len(piece)

    def add(self, part: bytes) -> None:
        """Add the next part. Characters inside strings cost nothing."""
        text = self._rest + part
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        end = len(text) - num_backslashes % 2  # an escape may be cut in two
        text, self._rest = text[:end], text[end:]
        pieces = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        num_nodes = outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        zeros = self._begun + outside.translate(_TO_ZEROS)
        num_last = len(zeros) - len(zeros.rstrip(b"0"))
        self._begun = b"0" * (num_last % NUM_DIGITS)
        self.total += ITEM_COST * outside.count(b",") + NODE_COST * num_nodes
        self.total += DIGITS_COST * zeros.count(b"0" * NUM_DIGITS)


async def read_body(request: Request, kind: type[Body], api_server: ApiServer) -> Body:
    """Read the body of `request` and check it: size, JSON, fields, the model's name. A body without
    a seed gets one derived from the request's `Idempotency-Key`, and one without a session that of
    its header. A body of many values is validated in a thread: the event loop may run between two
    turns of a conversation.

    Raises:
        MooncakeError: 413 too large, 415 not JSON, 404 another model, 400 not valid, 429 too much
            in memory, 503 too many wait to be validated; the message names the field or the limit.
        ClientDisconnect: the client has left.
    """
    config = api_server.config
    body, cost = await read_json(request, config)
    if cost.total <= MAX_COST_HERE:
        fields = _validated(kind, body)
    else:
        working = api_server.tokenizing.run(lambda: _validated(kind, body), tenant_of(request))
        fields = await unless_gone(request, working)
    since_turn = 0
    for num_bytes in cost.texts(fields.json_texts):
        _check_size(len(body), cost.total, config)
        since_turn = await _turn(since_turn + num_bytes)
    api_server.check_body(fields)
    if isinstance(fields, SharedFields):
        if fields.seed is None:
            fields.seed = getattr(request.state, "seed", None)
        session = request.headers.get(SESSION)
        if session and not fields.session_id:
            fields.session_id = session[:MAX_SESSION_CHARS]
    return fields


def media_type(headers: Headers) -> str:
    """Return the `Content-Type` without its parameters."""
    return headers.get("content-type", "").split(";", 1)[0].strip().lower()


def says_json(headers: Headers) -> bool:
    """Return whether a body is said to be JSON. A browser asks before it sends such a body to
    another site.
    """
    media = media_type(headers)
    return media == "application/json" or media.endswith("+json")


async def read_json(request: Request, config: ApiConfig) -> tuple[bytes, JsonCost]:
    """Read the body of `request` within the limits and return it with its cost. It is said to be
    JSON, and is not parsed here.

    Raises:
        MooncakeError: 413 too large, 415 not JSON, 429 too much in memory.
        ClientDisconnect: the client has left.
    """
    if not says_json(request.headers):
        media = media_type(request.headers)
        raise ApiError(
            415,
            "UnsupportedMediaTypeError",
            f"the body must be JSON: send 'Content-Type: application/json', not {media[:80]!r}",
        )
    length = request.headers.get("content-length", "0")
    _check_size(int(length) if length.isdecimal() else 0, 0, config)
    parts: list[bytes] = []
    size, cost, since_turn = 0, JsonCost(), 0
    async for part in request.stream():
        size += len(part)
        cost.add(part)
        _check_size(size, cost.total, config)
        request.state.in_flight.add_bytes(len(part))
        parts.append(part)
        since_turn = await _turn(since_turn + len(part))
    return b"".join(parts), cost


async def _turn(num_bytes: int) -> int:
    """Give other tasks their turn after `TURN_BYTES`; return the bytes read since the last turn."""
    if num_bytes <= TURN_BYTES:
        return num_bytes
    await asyncio.sleep(0)  # what has arrived is read without a wait
    return 0


def _validated(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error, body) from error


def _check_size(num_bytes: int, cost: int, config: ApiConfig) -> None:
    kind = "RequestTooLargeError"
    if num_bytes > config.max_body_bytes:
        limit = f"{config.max_body_bytes} bytes (`max-body-bytes`)"
        raise ApiError(413, kind, f"the body is larger than the limit of {limit}")
    if cost > config.max_body_cost:
        limit = f"the limit is {config.max_body_cost} (`max-body-cost`)"
        count = (
            f"fields, objects and lists count {NODE_COST} each, items of lists {ITEM_COST}, and "
            f"each {NUM_DIGITS} digits of a number {DIGITS_COST}"
        )
        raise ApiError(413, kind, f"the body has too many values: {count}, and {limit}")


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
