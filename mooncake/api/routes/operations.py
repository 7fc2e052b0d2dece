"""What operators ask: health, version, metrics, the cluster's status."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from mooncake import __version__
from mooncake.api.door import Door
from mooncake.api.errors import error_headers
from mooncake.api.http import json_response
from mooncake.api.schema.replies import encode
from mooncake.base import Unavailable


def operation_routes(door: Door) -> APIRouter:
    """Return the operators' routes over `door`."""
    router = APIRouter()

    @router.get("/health", response_class=Response, responses={503: {"description": "Not now."}})
    async def health() -> Response:
        """200 when a request would be served now, else 503; no body."""
        if door.ready:
            return Response()
        return Response(status_code=503, headers=error_headers(Unavailable("not ready")))

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        """200 as long as the process answers."""
        return Response()

    @router.get("/version")
    async def version() -> Response:
        """The version of this server."""
        return json_response(encode({"version": __version__}))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """All series in Prometheus' text format."""
        return Response(
            door.backend.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @router.get("/v1/cluster/status")
    async def status() -> Response:
        """Workers, pool and load: what `mooncake status` shows."""
        return json_response(encode(door.backend.status()))

    return router
