"""Sends replies: JSON, errors, and calls that are answered whole or as a stream of events.

A `Renderer` makes the contents of a reply. There is one response object for each request; nothing
else is owned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake.api.api_server import ApiServer
from mooncake.api.backend import NO_LIMITS
from mooncake.api.errors import (
    ANTHROPIC_PATH,
    anthropic_error,
    error_headers,
    error_reply,
    forbidden,
)
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.http.limits import latency_limits
from mooncake.api.http.tracing import call_attributes
from mooncake.api.schema.fields import GenerationFields
from mooncake.api.schema.replies import CachedTokens, ReasoningTokens, Usage
from mooncake.api.text.answer import Delta
from mooncake.base import InternalError, MooncakeError, Priority

_log = logging.getLogger(__name__)

_FAILED = "the server failed on this request; its log says why"

Made = TypeVar("Made")
Body = TypeVar("Body", bound=GenerationFields)

DONE = b"data: [DONE]\n\n"

MAX_SIZE_HERE = 2048
"""The most tokens and log-probabilities that are written in the event loop: a few milliseconds."""


class ClientGone(MooncakeError):
    """The client closed the connection: there is nothing to answer any more."""


class Renderer(Protocol):
    """Writes the contents of the reply to one call, in the format of one API."""

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        """Return the JSON body for a finished call; `deltas` hold the whole choices, in order."""

    def begin(self, call: Call) -> list[bytes]:
        """Return the events before the first token, as `event` makes them."""

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        """Return the events for `delta`."""

    def end(self, call: Call) -> list[bytes]:
        """Return the events after the last token."""

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        """Return the last events of a stream that `error` cut off."""


class OpenAiRenderer(Generic[Body]):
    """What the renderers of chat and completions share: the head of every reply, usage, and the
    last events of a stream. There is one object for each call.
    """

    def __init__(self, api_server: ApiServer, body: Body) -> None:
        self._body = body
        self._model = api_server.names[0]
        self._fingerprint = api_server.fingerprint
        self._created = api_server.now_s()
        self._tokenizer = api_server.model.tokenizer

    @cached_property
    def _speller(self) -> LogprobSpeller:
        return LogprobSpeller(self._tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        """Return the last events of a stream that `error` cut off."""
        del call
        return [event(error_reply(error)), DONE]

    def _usage_so_far(self, call: Call) -> Usage | UnsetType | None:
        """Return the usage for a chunk. It is null except in the last chunk, unless the client
        wants it in all.
        """
        if self._body.continuous_usage:
            return self._usage(call)
        return None if self._body.include_usage else UNSET

    def _usage(self, call: Call) -> Usage:
        return call_usage(call)


def call_usage(call: Call, *, num_output_tokens: int | None = None) -> Usage:
    """Return the tokens of `call` so far; `num_output_tokens` replaces its own count."""
    output = call.num_output_tokens if num_output_tokens is None else num_output_tokens
    reasoning = call.num_reasoning_tokens
    return Usage(
        prompt_tokens=call.num_prompt_tokens,
        completion_tokens=output,
        total_tokens=call.num_prompt_tokens + output,
        prompt_tokens_details=CachedTokens(call.num_cached_tokens, call.cache or UNSET),
        completion_tokens_details=ReasoningTokens(reasoning) if reasoning else UNSET,
    )


def call_id(prefix: str, request: Request, given: str | None) -> str:
    """Return the id of a call: the one `given` in the body, otherwise that of the HTTP request."""
    return f"{prefix}-{given or request.state.request_id}"


def json_response(body: bytes, status: int = 200) -> Response:
    """Return a reply with the JSON text `body`."""
    return Response(body, status_code=status, media_type="application/json")


class ErrorResponse(Response):
    """Sends an error in the shape that clients of the request's path expect."""

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
    """Runs a call and sends its reply; the call is aborted when the client disconnects.

    The headers of a stream wait for the first token, so that a refusal still has its own status.
    The tokens of the prompts are charged to the API key before they run, and given back when an
    error is sent instead of an answer. Steps that a beam search has made are not given back. A
    reply that takes more than a moment to write is written in a thread.
    """

    def __init__(
        self, api_server: ApiServer, call: Call, renderer: Renderer, *, stream: bool
    ) -> None:
        super().__init__()
        self._api_server = api_server
        self._call = call
        self._renderer = renderer
        self._stream = stream
        self._tenant = ""
        self._gone: asyncio.Future[None] | None = None
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        state = scope.get("state", {})
        asked = call.requests[0].priority  # a call has only one class
        try:
            check_class(state, asked)
            limits = latency_limits(Headers(scope=scope), state.get("key"), asked)
            state["in_flight"].add_logprobs(call.max_logprobs)
        except MooncakeError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        tenant, trace = state.get("tenant", ""), state.get("trace")
        self._tenant = tenant
        ids = [each.request_id for each in call.requests]
        traced = trace is not None and call.is_traceable and trace.follow(ids)
        receipts = self._api_server.receipts
        if receipts is not None and call.is_traceable:
            begun_at = self._api_server.now_s()
            traced |= receipts.open(call.receipt_id, call.call_id, tenant, ids, begun_at)
            state["receipt"] = call.receipt_id  # `Access` sends it
        if tenant or traced or limits != NO_LIMITS:
            call.run_as(tenant, traced=traced, limits=limits)
        charge = state.get("charge", _free)
        charge(call.prompt_price)
        watcher = self._gone = asyncio.create_task(_watch_disconnect(receive, call))
        try:
            with self._api_server.running(call):
                refused = await self._run(scope, receive, send)
                state["is_complete"] = refused is None and self._is_complete
                charge(
                    call.num_charged_tokens
                    if refused is None
                    else call.num_dropped_tokens - call.prompt_price
                )
                if refused is not None:
                    await ErrorResponse(refused)(scope, receive, send)
        finally:
            watcher.cancel()
            if trace is not None:
                trace.root.attributes.update(call_attributes(call))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> MooncakeError | None:
        """Send the answer, or return the error to send instead when nothing has been sent yet."""
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
            deltas = await self._call.finish()
            size = sum(delta.size for delta in deltas) + self._call.num_prompt_tokens
            if size <= MAX_SIZE_HERE:
                body = self._renderer.whole(self._call, deltas)
            else:
                body = await self._written(partial(self._renderer.whole, self._call, deltas))
            del deltas  # so that a client that reads slowly holds only the body
            await json_response(body)(scope, receive, send)
            self._is_complete = True

    async def _written(self, work: Callable[[], Made]) -> Made:
        """Write a part of a long answer in a thread. Tenants take turns there. A client that leaves
        frees its place there.
        """
        assert self._gone is not None
        try:
            return await _before(self._gone, self._api_server.writing.run(work, self._tenant))
        except ClientDisconnect:
            raise ClientGone("the client closed the connection") from None

    async def _send_stream(self, send: Send, deltas: list[Delta] | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            events = self._renderer.begin(self._call)
            while deltas is not None:
                for delta in deltas:
                    if delta.size <= MAX_SIZE_HERE:
                        events += self._renderer.chunk(self._call, delta)
                    else:
                        write = partial(self._renderer.chunk, self._call, delta)
                        events += await self._written(write)
                if events:
                    body = b"".join(events)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                events = []
                deltas = await self._call.deltas()
            events = self._renderer.end(self._call)
            self._is_complete = True
        except ClientGone:
            raise
        except MooncakeError as error:
            events = self._renderer.failed(self._call, error)
        except Exception:
            _log.exception("a stream failed")
            events = self._renderer.failed(self._call, InternalError(_FAILED))
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})


def check_class(state: Mapping[str, Any], asked: Priority) -> None:
    """Raise ApiError for a call whose class its key may not ask for. `state`: of its scope."""
    allowed: Sequence[Priority] = state.get("priorities", tuple(Priority))
    if asked in allowed:
        return
    raise forbidden(
        f"priority: this API key may not ask for {asked.value}, only for "
        f"{', '.join(priority.value for priority in allowed)}; add {asked.value} to the key's "
        "`priorities` in `api-keys-file`, or ask for another class (`priority`, `service_tier`)",
        param="priority",
    )


def _free(num_tokens: int) -> None:
    """Charge nothing. It replaces an account's `charge` if no API key is needed."""


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
]


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one server-sent event. `data` is JSON, so it has no line breaks."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, data)


async def unless_gone(request: Request, making: Coroutine[Any, Any, Made]) -> Made:
    """Return what `making` returns. If the client leaves before that, it is cancelled and so frees
    what it holds. The body of `request` has been read.

    Raises:
        ClientDisconnect: the client has left.
    """
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        return await _before(gone, making)
    finally:
        gone.cancel()


async def _before(gone: asyncio.Future[None], making: Coroutine[Any, Any, Made]) -> Made:
    """Return what `making` returns. If `gone` is done before that, cancel it and raise
    ClientDisconnect.
    """
    made = asyncio.ensure_future(making)
    both: set[asyncio.Future[Any]] = {made, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ClientDisconnect
        return made.result()
    finally:
        made.cancel()


def tenant_of(request: Request) -> str:
    """Return the tenant of a request; "": no key is needed."""
    return getattr(request.state, "tenant", "")


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch_disconnect(receive: Receive, call: Call) -> None:
    await until_gone(receive)
    call.fail(ClientGone("the client closed the connection"))
