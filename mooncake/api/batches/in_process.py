"""Asks a route of this server without a connection: the same middleware, checks, receipts and
usage as for a request by HTTP. No state.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from mooncake.api.http.access import OWN_CALL, OwnCall

PART_BYTES = 1 << 16
"""Bytes of a body that come at a time, as from a connection: others have their turn between."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


async def ask(app: ASGIApp, path: str, body: bytes, name: str, caller: OwnCall) -> Reply:
    """POST the JSON `body` to `path` as `caller`; `name` is the request's id. To cancel this
    ends the request as if its client had left.
    """
    given: list[Message] = [
        {"type": "http.request", "body": body[at : at + PART_BYTES], "more_body": True}
        for at in range(0, len(body), PART_BYTES)
    ]
    given.append({"type": "http.request", "body": b"", "more_body": False})
    given.reverse()
    status, headers, parts = 500, Headers(), list[bytes]()

    async def receive() -> Message:
        if given:
            return given.pop()
        # No client can leave early: whoever asks cancels the whole call instead.
        await asyncio.Future()
        raise AssertionError("a future that nobody knows has a result")

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
        else:
            parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", name.encode()),
        ],
        "client": None,
        "server": None,
        "state": {OWN_CALL: caller},
    }
    with contextlib.suppress(Exception):  # it was logged and answered, as for a connection
        await app(scope, receive, send)
    return Reply(status, headers, b"".join(parts))
