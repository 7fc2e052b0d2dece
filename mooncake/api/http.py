"""HTTP's side of a call: reading bodies within limits, JSON and event-stream replies, disconnects.

Pure of models and text: a `Renderer` says what goes into the replies.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake.api.config import ApiConfig
from mooncake.api.door import Door
from mooncake.api.errors import (
    ANTHROPIC_PATH,
    ApiError,
    anthropic_error,
    error_headers,
    error_reply,
    validation_error,
)
from mooncake.api.generation import Call, Delta
from mooncake.api.json_cost import ITEM_COST, NODE_COST, JsonCost
from mooncake.base import InternalError, MooncakeError

_log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)

_FAILED = "the server failed on this request; its log says why"

DONE = b"data: [DONE]\n\n"


class ClientGone(MooncakeError):
    """The client closed the connection; nobody reads a reply."""


class Renderer(Protocol):
    """Writes the replies of one call."""

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        """Return the JSON body for a finished call; `deltas` are the whole choices in order."""

    def begin(self, call: Call) -> list[bytes]:
        """Return the events before the first token, as `event` makes them."""

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        """Return the events for `delta`."""

    def end(self, call: Call) -> list[bytes]:
        """Return the events after the last token."""

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        """Return the last events of a stream that `error` cut off."""


async def read_body(request: Request, kind: type[Body], config: ApiConfig) -> Body:
    """Read, size-check, parse and validate the body of `request`.

    Raises:
        MooncakeError: 413 too large, 415 not JSON, 400 not valid; the message names the field.
    """
    content_type = request.headers.get("content-type", "application/json")
    media = content_type.split(";", 1)[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(
            415,
            "UnsupportedMediaTypeError",
            f"the body must be JSON: send 'Content-Type: application/json', not {media[:80]!r}",
        )
    length = request.headers.get("content-length", "0")
    _check_size(int(length) if length.isdecimal() else 0, 0, config)
    parts: list[bytes] = []
    size, cost = 0, JsonCost()
    async for part in request.stream():
        size += len(part)
        cost.add(part)
        _check_size(size, cost.total, config)
        parts.append(part)
    body = b"".join(parts)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error, body) from error


def _check_size(num_bytes: int, cost: int, config: ApiConfig) -> None:
    kind = "RequestTooLargeError"
    if num_bytes > config.max_body_bytes:
        limit = f"{config.max_body_bytes} bytes (--max-body-bytes)"
        raise ApiError(413, kind, f"the body is larger than the limit of {limit}")
    if cost > config.max_body_cost:
        limit = f"the limit is {config.max_body_cost} (--max-body-cost)"
        count = f"fields, objects and lists count {NODE_COST} each, items of lists {ITEM_COST}"
        raise ApiError(413, kind, f"the body has too many values: {count}, and {limit}")


def call_id(prefix: str, request: Request, given: str | None) -> str:
    """Return the id of a call: the body's word for it, else the request's (header or random)."""
    return f"{prefix}-{given or request.state.request_id}"


def json_response(body: bytes, status: int = 200) -> Response:
    """Return a reply of ready JSON."""
    return Response(body, status_code=status, media_type="application/json")


def error_response(error: MooncakeError) -> Response:
    """Return the reply for `error`."""
    return ErrorResponse(error)


class ErrorResponse(Response):
    """An error in the shape that clients of the path expect."""

    def __init__(self, error: MooncakeError) -> None:
        super().__init__(
            error_reply(error), error.http_status, error_headers(error), "application/json"
        )
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(ANTHROPIC_PATH):
            self.body = anthropic_error(self._error)
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class CallResponse(Response):
    """Runs a call and sends its reply; the call ends with the connection.

    A streaming reply's headers wait for the first token, so a refusal still has its own status.
    Prompts are charged before they run; who gets an error instead of an answer is given them back.
    """

    def __init__(self, door: Door, call: Call, renderer: Renderer, *, stream: bool) -> None:
        super().__init__()
        self._door = door
        self._call = call
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        state = scope.get("state", {})
        if tenant := state.get("tenant"):
            call.run_as(tenant)
        charge = state.get("charge", _free)
        charge(call.num_prompt_tokens)
        self._door.opened(call)
        watcher = asyncio.create_task(_watch_disconnect(receive, call))
        try:
            refused = await self._run(scope, receive, send)
            charge(call.num_output_tokens if refused is None else -call.num_prompt_tokens)
            if refused is not None:
                await error_response(refused)(scope, receive, send)
        finally:
            watcher.cancel()
            self._door.closed(call)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> MooncakeError | None:
        """Answer, or return what is to be said instead: nothing has been sent then."""
        try:
            async with self._call:
                await self._reply(scope, receive, send)
        except ClientGone:
            _log.debug("a client disconnected")
        except MooncakeError as error:  # a stream that has begun keeps its own
            return error
        except Exception:
            _log.exception("a call failed")
            return InternalError(_FAILED)
        return None

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(send, await self._call.deltas())
        else:
            body = self._renderer.whole(self._call, await self._call.finish())
            await json_response(body)(scope, receive, send)

    async def _send_stream(self, send: Send, deltas: list[Delta] | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            events = self._renderer.begin(self._call)
            while deltas is not None:
                for delta in deltas:
                    events += self._renderer.chunk(self._call, delta)
                if events:
                    body = b"".join(events)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                events = []
                deltas = await self._call.deltas()
            events = self._renderer.end(self._call)
        except ClientGone:
            raise
        except MooncakeError as error:
            events = self._renderer.failed(self._call, error)
        except Exception:
            _log.exception("a stream failed")
            events = self._renderer.failed(self._call, InternalError(_FAILED))
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})


def _free(num_tokens: int) -> None:
    """Charge nobody: there is no key, or it has no limit."""


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
]


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one server-sent event; `data` is JSON, so it has no line breaks."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, data)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch_disconnect(receive: Receive, call: Call) -> None:
    await until_gone(receive)
    call.fail(ClientGone("the client closed the connection"))
