"""`GET /v1/requests/{name}/receipt` and `GET /v1/cluster/bundles/{name}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.errors import ApiError, ErrorReply, shorten
from mooncake.api.http.response import json_response, tenant_of, unless_gone
from mooncake.api.http.router import Router
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import encode
from mooncake.telemetry.audit import OPERATOR_ROUTE, audit
from mooncake.telemetry.receipt import Bundle, Receipt
from mooncake.telemetry.receipts import Kept, Receipts, bundle


def receipt_routes(api_server: ApiServer) -> Router:
    """Return the routes of receipts over `api_server`."""
    router = Router()

    def found(name: str, tenant: str | None) -> tuple[Receipts, Kept]:
        receipts = api_server.receipts
        if receipts is None:
            raise ApiError(404, "NotFoundError", "this server keeps no receipts (`max-receipts` 0)")
        kept = receipts.find(name, tenant)
        if kept is None:
            own = api_server.config.gateway_id
            raise ApiError(
                404,
                "NotFoundError",
                f"no receipt {shorten(name)} is here: the gateway that answers"
                f"{f' ({own})' if own else ''} keeps the receipts of its own last calls; the name "
                "of a receipt begins with the name of its gateway",
            )
        return receipts, kept

    @router.get("/v1/requests/{name:path}/receipt", described=operation(None, Receipt, ErrorReply))
    async def receipt(request: Request, name: str) -> Response:
        """Return which workers one of the last calls had and why, and how it went.

        The name is in `X-Mooncake-Receipt`, or the `id` of an answer, or a request's id in the log.
        """
        own = tenant_of(request)
        receipts, kept = found(name, None if request.state.is_operator else own)
        if kept.tenant != own and (who := getattr(request.state, "key_name", None)):
            whence = request.client.host if request.client else None
            path = request.url.path
            audit(OPERATOR_ROUTE, kind=f"{who} {path}", who=who, whence=whence, path=path)

        async def weighed() -> None:
            while await api_server.tokenizing.run(lambda: receipts.weigh(kept), own):
                pass  # slow, so other tenants have their turn after each placement

        await unless_gone(request, weighed())
        return json_response(encode(receipts.receipt(kept)))

    @router.get("/v1/cluster/bundles/{name:path}", described=operation(None, Bundle, ErrorReply))
    async def bundles(request: Request, name: str) -> Response:
        """Return the facts of the placements of one of the last calls: `mooncake simulate --replay`
        makes these choices again.
        """
        _, kept = found(name, None)
        making = api_server.tokenizing.run(lambda: encode(bundle(kept)), tenant_of(request))
        return json_response(await unless_gone(request, making))

    return router
