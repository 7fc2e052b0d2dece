"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}` and a status.

Validation errors of pydantic become one readable sentence that names the field.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from mooncake.base import (
    Failure,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    MooncakeError,
    Overloaded,
    RequestTimeout,
    Unavailable,
)

MAX_ECHO_CHARS = 200
"""The most characters of a client's own input that a message repeats."""


class ApiError(MooncakeError):
    """An error of HTTP itself, for which `mooncake.base` has no class."""

    def __init__(
        self,
        status: int,
        error_type: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.http_status = status
        self.error_type = error_type


def forbidden(message: str, *, param: str | None = None) -> ApiError:
    """Return the error for something that this client may not do."""
    return ApiError(403, "PermissionDeniedError", message, param=param)


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inner object of an error reply."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(msgspec.Struct, frozen=True):
    """The reply to every failed call."""

    error: ErrorInfo


def error_reply(error: MooncakeError) -> bytes:
    """Return the JSON body for `error`."""
    info = ErrorInfo(error.message, error.error_type, error.param, error.http_status)
    return msgspec.json.encode(ErrorReply(info))


ANTHROPIC_PATH = "/v1/messages"
"""Clients of the paths that begin with this expect Anthropic's errors."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    """The inner object of an error in Anthropic's shape."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    """The reply to every failed call of Anthropic's API."""

    error: AnthropicErrorInfo
    type: str = "error"


def anthropic_error(error: MooncakeError) -> bytes:
    """Return the JSON body for `error` in Anthropic's shape; also used in a stream's error
    event.
    """
    other = "api_error" if error.http_status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.http_status, other)
    return msgspec.json.encode(AnthropicError(AnthropicErrorInfo(kind, error.message)))


def error_headers(error: MooncakeError) -> dict[str, str]:
    """Return the headers for `error`: when to try again, and how to authenticate."""
    headers: dict[str, str] = {}
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


_KINDS: dict[int, type[MooncakeError]] = {
    kind.http_status: kind
    for kind in (InvalidRequest, ModelNotFound, RequestTimeout, Overloaded, Unavailable)
}


def failure_error(failure: Failure) -> MooncakeError:
    """Turn an error that the cluster reported into the error that the client sees."""
    kind = _KINDS.get(failure.status, InternalError)
    error = kind(failure.message, param=failure.param, retry_after_s=failure.retry_after_s)
    error.http_status, error.error_type = failure.status, failure.error_type
    return error


def unknown_field(name: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error for an unknown field; it names the `known` one nearest to it."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return InvalidRequest(f"{shorten(name)} is no known field{hint}", param=name)


def validation_error(error: ValidationError, document: Any) -> InvalidRequest:
    """Turn pydantic's findings about `document` into one error that names the first wrong field.

    `document`: what was validated, as JSON text (bytes) or as a Python value.
    """
    findings = error.errors(include_url=False, include_context=False)
    # A list that is too long is just that, whatever else it might have been.
    findings = [each for each in findings if each["type"] == "too_long"] or findings
    first = findings[0]
    if first["type"] == "json_invalid":
        problem = first["msg"].removeprefix("Invalid JSON: ")
        return InvalidRequest(f"the body is not valid JSON: {problem}")
    if isinstance(document, bytes):
        document = _parse(document)
    start = _real_path(first, document)
    paths = [_real_path(finding, document) for finding in findings]
    # Of the alternatives at the first wrong place, the one that got furthest is what was meant.
    path = max((path for path in paths if path[: len(start)] == start), key=len)
    reasons = [
        _reason(finding["msg"])
        for finding, where in zip(findings, paths, strict=True)
        if where == path
    ]
    param = _spell(path)
    message = " or ".join(dict.fromkeys(reasons)).replace(" or must be ", " or ")
    if param:
        return InvalidRequest(f"{param}: {message}", param=param)
    return InvalidRequest(f"the body {message}" if message.startswith("must ") else message)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def shorten(value: object) -> str:
    """Return a client's value for a message, cut to a sensible length."""
    text = repr(value[:MAX_ECHO_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= MAX_ECHO_CHARS else f"{text[: MAX_ECHO_CHARS - 1]}…"


def _real_path(finding: Mapping[str, Any], document: Any) -> tuple[int | str, ...]:
    """Keep the steps of a location that exist in the document: pydantic also names the members of
    unions there.
    """
    path: list[int | str] = []
    for step in finding["loc"]:
        if _holds(document, step):
            document = document[step]
        elif finding["type"] != "missing" or step != finding["loc"][-1]:
            continue
        path.append(step)
    return tuple(path)


def _holds(document: Any, step: int | str) -> bool:
    if isinstance(document, list):
        return isinstance(step, int) and step < len(document)
    return isinstance(document, dict) and step in document


_PHRASES = {"Input should be ": "must be ", "List should have ": "must have "}
"""How pydantic's messages begin -> how ours begin."""


def _spell(path: Iterable[int | str]) -> str:
    """Write a path in the form that clients use: `messages[0].content`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _reason(message: str) -> str:
    text = message.removeprefix("Value error, ")
    for theirs, ours in _PHRASES.items():
        if text.startswith(theirs):
            return ours + text.removeprefix(theirs).partition(" after validation")[0]
    return text[:1].lower() + text[1:]


class Repeated(Exception):
    """Raised into the application when the body of a repeat has arrived: there is nothing to
    run.
    """
