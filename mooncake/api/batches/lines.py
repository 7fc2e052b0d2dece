"""The lines of batches: what an input line must have, the body that it becomes, and the lines of
output and error files. Pure functions and one checker; no files, no database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Raw

from mooncake.api.errors import error_reply, shorten
from mooncake.api.schema.batches import BatchError
from mooncake.api.schema.replies import encode
from mooncake.base import InvalidRequest, MooncakeError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Routes that a batch may ask."""
MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""How many mistakes of an input file are reported. After these it is read no further."""
CANCELLED = "batch_cancelled"
EXPIRED = "batch_expired"
TOO_LARGE = "output_too_large"
INPUT_GONE = "input_file_gone"
_REASONS = {
    CANCELLED: "The batch was cancelled before this request was answered.",
    EXPIRED: "The completion window ended before this request was answered.",
    INPUT_GONE: "The server no longer has the input file; send this request in another batch.",
    TOO_LARGE: "The answers of this batch fill the room for them "
    "(`max-tenant-batch-bytes`); send this request in another batch.",
}
_SET_HERE = frozenset({"priority", "service_tier"})
"""Fields of a body that choose its class."""


class TextLine(NamedTuple):
    """One line of an input file. `text` is None if the line is longer than is read."""

    number: int
    text: bytes | None


class InputLine(msgspec.Struct, frozen=True):
    """A request of a batch, as the client wrote it."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Raw]


class Result(NamedTuple):
    """The one line of output or error file that an input line ends in."""

    line: int
    is_error: bool
    text: bytes
    code: str = ""
    """Why it was not answered; "" = it was."""


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _NoAnswer(msgspec.Struct, frozen=True):
    code: str
    message: str


class _OutputLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: _NoAnswer | None


_DECODER = msgspec.json.Decoder(InputLine)


def read_line(text: bytes) -> InputLine:
    """Return the request in a line of an input file.

    Raises:
        InvalidRequest: it is not a JSON object with these fields; the message names the field.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not a request of a batch: {error}") from error


def check_line(line: InputLine, endpoint: str) -> None:
    """Raise InvalidRequest, with the name of the field, for a line that `endpoint` cannot take."""
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise InvalidRequest(
            f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters", param="custom_id"
        )
    if line.method != "POST":
        raise InvalidRequest(f"method: must be 'POST', not {shorten(line.method)}", param="method")
    if line.url != endpoint:
        raise InvalidRequest(
            f"url: must be the endpoint of the batch, {endpoint}, not {shorten(line.url)}",
            param="url",
        )
    if line.body.get("stream", Raw(b"false")) not in (Raw(b"false"), Raw(b"null")):
        raise InvalidRequest(
            "body.stream: a batch has no streams; leave it out", param="body.stream"
        )


class InputChecker:
    """Checks the lines of one input file, in order. Tells at most `MAX_ERRORS` mistakes."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._seen: dict[bytes, int] = {}
        """Digest of a custom_id -> its line."""
        self.num_lines = 0
        self.errors: list[BatchError] = []

    @property
    def is_hopeless(self) -> bool:
        """True once further lines would add nothing to what is told."""
        return len(self.errors) >= MAX_ERRORS or self.num_lines > self._max_lines

    def check(self, lines: Iterable[TextLine]) -> None:
        """Check the next lines of the file. Slow: call it in a thread."""
        for number, text in lines:
            self.num_lines += 1
            if self.is_hopeless:
                break
            try:
                self._check_one(number, text)
            except InvalidRequest as error:
                self._add("invalid_request", error.message, number, error.param)

    def end(self) -> list[BatchError]:
        """Return the mistakes of the whole file; [] = it may run."""
        if not self.num_lines:
            self._add("empty_file", "the input file has no line", None, None)
        if self.num_lines > self._max_lines:
            limit = f"the limit is {self._max_lines} (`max-batch-lines`)"
            message = f"the input file has too many lines: {limit}; split it"
            self._add("too_many_lines", message, None, None)
        return self.errors

    def _check_one(self, number: int, text: bytes | None) -> None:
        if text is None:
            raise InvalidRequest(
                f"the line is longer than the limit of {self._max_line_bytes} bytes "
                "(`max-body-bytes`)"
            )
        line = read_line(text)
        check_line(line, self._endpoint)
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            message = f"custom_id: {shorten(line.custom_id)} is that of line {first}, too"
            self._add("duplicate_custom_id", message, number, "custom_id")

    def _add(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.errors.append(BatchError(code=code, message=message, line=line, param=param))


def request_body(line: InputLine) -> bytes:
    """Return the body to send for a line: its own, in the class batch whatever it asked for."""
    fields = {name: value for name, value in line.body.items() if name not in _SET_HERE}
    return encode(fields | {"priority": Raw(b'"batch"')})


def request_name(batch_id: str, number: int) -> str:
    """Return the id of the request of a line; it is the same at each try."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(batch_id: str, number: int, custom_id: str, status: int, body: bytes) -> Result:
    """Return the result of a line that got an HTTP answer; its body is JSON."""
    name = request_name(batch_id, number)
    # JSON has no line break inside of a string, so those that it has may go.
    response = _Response(
        status, name, Raw((body or b"null").replace(b"\n", b" ").replace(b"\r", b" "))
    )
    return Result(number, status != 200, encode(_OutputLine(name, custom_id, response, None)))


def failed(batch_id: str, number: int, custom_id: str, error: MooncakeError) -> Result:
    """Return the result of a line that could not be asked because of `error`."""
    return answered(batch_id, number, custom_id, error.http_status, error_reply(error))


def not_answered(batch_id: str, number: int, custom_id: str, code: str) -> Result:
    """Return the result of a line that was not asked. `code` is one of this module's."""
    name = request_name(batch_id, number)
    line = _OutputLine(name, custom_id, None, _NoAnswer(code, _REASONS[code]))
    return Result(number, True, encode(line), code)
