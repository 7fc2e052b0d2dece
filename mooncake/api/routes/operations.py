"""The routes for operators: health, version, metrics, the cluster's status."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from mooncake import __version__
from mooncake.api.api_server import ApiServer
from mooncake.api.http.response import ErrorResponse, json_response
from mooncake.api.schema.replies import encode

_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "Not now: the message says what is missing.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
    }
}


def operation_routes(api_server: ApiServer) -> APIRouter:
    """Return the operators' routes over `api_server`."""
    router = APIRouter()

    @router.get("/health", response_class=Response, responses=_NOT_READY)
    async def health() -> Response:
        """200 without a body when a request would be served now, else 503 and what is missing."""
        return Response() if api_server.ready else ErrorResponse(api_server.not_ready)

    @router.get("/ping", response_class=Response)
    async def ping() -> Response:
        """200 as long as the process answers, ready or not: for liveness probes."""
        return Response()

    @router.get("/version")
    async def version() -> Response:
        """The version of this server."""
        return json_response(encode({"version": __version__}))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(
            api_server.backend.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @router.get("/v1/cluster/status")
    async def status() -> Response:
        """Workers, pool and load: what `mooncake status` shows."""
        return json_response(encode(api_server.backend.status()))

    return router
