"""The web page at `/`, its files, and the feed of events for its view of the cluster.

Files are read once and served from memory by their exact names: no path of a request is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake.api.api_server import ApiServer
from mooncake.api.http.access import PAGE_PATH
from mooncake.api.http.response import STREAM_HEADERS, ErrorResponse, event, until_gone
from mooncake.api.http.router import Router
from mooncake.api.schema.replies import encode
from mooncake.base import Overloaded

_MEDIA = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # always asked for, and answered with 304 when it is the same
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(api_server: ApiServer) -> Router:
    """Return the page's routes over `api_server`. They are not in the OpenAPI document: people use
    them, and the feed has no end.
    """
    router = Router()
    files = _read_files()

    @router.get("/")
    async def page(request: Request) -> Response:
        """The page itself."""
        return _file(request, files, "index.html")

    if api_server.config.docs:

        @router.get("/docs")
        async def docs(request: Request) -> Response:
            """The page that shows the OpenAPI document."""
            return _file(request, files, "docs.html")

        documents: dict[str, tuple[bytes, str]] = {}

        @router.get("/openapi.json")
        async def openapi(request: Request) -> Response:
            """The OpenAPI document. Strangers may ask for it, so it is encoded only once."""
            if not documents:
                documents["openapi.json"] = _tagged(encode(request.app.openapi()))
            return _file(request, documents, "openapi.json")

    @router.get(PAGE_PATH + "{name}")
    async def file(request: Request, name: str) -> Response:
        """A file of the page."""
        return _file(request, files, name)

    @router.get("/v1/cluster/events")
    async def events() -> Response:
        """The cluster's status and its last requests, about once a second, without end."""
        return FeedResponse(api_server)

    return router


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name, each with its entity tag."""
    files: dict[str, tuple[bytes, str]] = {}
    for entry in resources.files("mooncake.api.page").iterdir():
        if entry.name.rpartition(".")[2] in _MEDIA:
            files[entry.name] = _tagged(entry.read_bytes())
    return files


def _tagged(body: bytes) -> tuple[bytes, str]:
    """Return a file with its entity tag."""
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _file(request: Request, files: dict[str, tuple[bytes, str]], name: str) -> Response:
    if name not in files:
        raise HTTPException(404)
    body, tag = files[name]
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_MEDIA[name.rpartition(".")[2]])


class FeedResponse(Response):
    """Sends the cluster's status as events until the client leaves or the server shuts down."""

    def __init__(self, api_server: ApiServer) -> None:
        super().__init__()
        self._api_server = api_server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api_server = self._api_server
        if api_server.num_listeners >= api_server.config.max_listeners:
            error = Overloaded(
                f"{api_server.num_listeners} listeners follow the cluster already",
                retry_after_s=5.0,
            )
            await ErrorResponse(error)(scope, receive, send)
            return
        ends = [
            asyncio.ensure_future(until_gone(receive)),
            asyncio.ensure_future(api_server.stopping()),
        ]
        api_server.num_listeners += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            while not any(end.done() for end in ends):
                body = event(
                    encode({"status": api_server.backend.status(), "recent": api_server.recent()})
                )
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait(
                    ends, timeout=api_server.config.feed_s, return_when=asyncio.FIRST_COMPLETED
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            api_server.num_listeners -= 1
            for end in ends:
                end.cancel()
