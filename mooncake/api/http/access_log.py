"""Writes one log line for every HTTP request (`--access-log`), when its reply has ended."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.base import Clock

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
