"""Traces calls (`--otlp-traces-endpoint`) with what the API server itself knows about them, and
writes one log line for every HTTP request (`--access-log`) when its reply has ended.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.api.errors import Repeated
from mooncake.api.generation.generation import Call
from mooncake.base import Clock
from mooncake.telemetry.traces import Attributes, Trace, Tracer

_log = logging.getLogger(__name__)

MAX_PATH_CHARS = 200
CLIENT_LEFT = 499
"""nginx' status for a client that disconnected before anything was sent."""


class AccessLog:
    """ASGI middleware that logs method, path, status, seconds, request id and the API key's name.

    It stands outside all other middleware, so it also sees what they answer. The id and the name
    come from `Access`, through the request's state. Query strings and keys are never logged.
    """

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = self._clock.now()
        status = CLIENT_LEFT

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except Exception:
            status = 500  # sent by the server's own handler, outside of all middleware
            raise
        finally:
            state = scope.get("state", {})
            # As it came on the wire: decoded, it could hold line breaks and forge lines.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            _log.info(
                "%s %s %d in %.3f s",
                scope["method"],
                path[:MAX_PATH_CHARS],
                status,
                self._clock.now() - begun_s,
                extra={"request_id": state.get("request_id"), "key": state.get("key_name")},
            )


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""The routes that are traced, each with its operation by OpenTelemetry's conventions."""


class Tracing:
    """ASGI middleware that traces calls of the model. It is inside `Access`, so requests without a
    valid key, or over a limit, are not traced.

    It sets `trace` in the scope's state of a call that is traced.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, clock: Clock, model_name: str) -> None:
        self._app = app
        self._tracer = tracer
        self._clock = clock
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope.get("path", ""))
        if operation is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
        trace = self._tracer.begin(parent, state, self._clock.now())
        if trace is None:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["trace"] = trace
        root, status = trace.root, CLIENT_LEFT
        root.attributes.update(
            {
                "http.request.method": "POST",
                "http.route": scope["path"],
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "mooncake",
                "gen_ai.request.model": self._model_name,
            }
        )

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif trace.sent_s is None:
                trace.sent_s = self._clock.now()
            await send(message)

        is_repeat = False
        try:
            await self._app(scope, receive, noted_send)
        except Repeated:  # it reads the answer of another call
            is_repeat = True
            raise
        except Exception:
            status = 500  # sent by the server's own handler, outside of all middleware
            raise
        finally:
            if not is_repeat:
                self._end(trace, status)

    def _end(self, trace: Trace, status: int) -> None:
        root = trace.root
        root.attributes["http.response.status_code"] = status
        if status >= 500:
            root.error = f"status {status}"
            root.attributes["error.type"] = str(status)
        self._tracer.end(trace, self._clock.now())


def call_attributes(call: Call) -> Attributes:
    """Return the trace attributes of a call that has ended: figures, and no text."""
    sampling = call.requests[0].sampling
    return {
        "gen_ai.response.id": call.call_id,
        "gen_ai.request.choice.count": len(call.choices),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": call.num_prompt_tokens,
        "gen_ai.usage.output_tokens": call.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.num_cached_tokens,
        "gen_ai.response.finish_reasons": [
            choice.finish_reason or "aborted" for choice in call.choices
        ],
    }
