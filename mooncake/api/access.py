"""Who may come in, and under which name the call runs: API keys and request ids, as plain ASGI.

Plain ASGI because it stands in every request's way: no task, no queue, no copy of the stream.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.api.http import error_response
from mooncake.base import IdSource, Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json"})
"""What needs no key: probes, scrapers and the documentation have none, and the page asks for it."""

PAGE_PATH = "/page/"
"""Where the page's own files are: the same for everybody."""

_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Access:
    """Checks the key, names the request, echoes `X-Request-Id` on every reply."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], ids: IdSource) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._ids = ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _PLAIN_ID.fullmatch(given) else self._ids.hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        if self._may_pass(scope, headers):
            await self._app(scope, receive, named_send)
        else:
            error = Unauthorized("a valid API key is needed: send 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, named_send)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(PAGE_PATH)
        if not self._digests or is_open or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # as it came on the wire
        # All keys are compared, each in constant time: the time tells nothing about any of them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)
