"""The routes for operators: health, version, metrics, the cluster's status."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mooncake import __version__
from mooncake.api.http.response import ErrorResponse, json_response
from mooncake.api.http.router import Router
from mooncake.api.running_calls import Serving
from mooncake.api.schema.openapi import JSON, answer
from mooncake.api.schema.replies import encode
from mooncake.telemetry.health import Probe

_READY = answer()
_READY["responses"]["503"] = {
    "description": "Not now: the message says what is missing.",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
}


def operation_routes(api_server: Serving) -> Router:
    """Return the operators' routes over `api_server`."""
    router = Router()

    async def probed(probe: Probe) -> Response:
        failing = await api_server.failing(probe)
        return Response() if failing is None else ErrorResponse(failing)

    @router.get("/health", described=_READY)
    async def health() -> Response:
        """Returns 200 without a body if a request would be served now, otherwise 503 and what is
        missing.
        """
        return await probed(Probe.READY)

    @router.get("/health/ready", described=_READY)
    async def ready() -> Response:
        """The same as `/health`."""
        return await probed(Probe.READY)

    @router.get("/health/startup", described=_READY)
    async def startup() -> Response:
        """Returns 200 once this process and the workers that it starts have started, otherwise
        503.
        """
        return await probed(Probe.STARTUP)

    @router.get("/health/live", described=_READY)
    async def live() -> Response:
        """Returns 200 as long as this process can go on, and 503 when it should be restarted."""
        return await probed(Probe.LIVE)

    @router.get("/ping", described=answer())
    async def ping() -> Response:
        """Returns 200 as long as the process answers, ready or not. Liveness probes use it."""
        return Response()

    @router.get("/version", described=answer(JSON))
    async def version() -> Response:
        """Return the version of this server."""
        return json_response(encode({"version": __version__}))

    @router.get("/metrics", described=answer("text/plain", {"type": "string"}))
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus' text format; those of tenants need an operator's key."""
        shown = await api_server.metrics(request.state.is_operator)
        return Response(shown, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/cluster/status", described=answer(JSON))
    async def status() -> Response:
        """Return workers, pool and load, as `mooncake status` shows them."""
        return json_response(encode(api_server.status()))

    return router
