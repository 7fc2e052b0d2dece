"""`/v1/batches`: many requests in one file, answered when the cluster has room."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.batches.service import BatchService
from mooncake.api.errors import ErrorReply
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import check_class, json_response, tenant_of
from mooncake.api.http.router import Router
from mooncake.api.routes.files import AFTER, limit_of, limit_parameter, needed
from mooncake.api.schema.batches import BatchList, BatchObject, BatchRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import encode
from mooncake.base import Priority

MAX_BATCHES = 100


def batch_routes(api_server: ApiServer, batches: BatchService | None) -> Router:
    """Return the routes of batches; without `batches` they say what turns them on."""
    router = Router()

    @router.post("/v1/batches", described=operation(BatchRequest, BatchObject, ErrorReply))
    async def create(request: Request) -> Response:
        """Answer every line of an uploaded file, in the class batch."""
        service = needed(batches)
        check_class(request.scope["state"], Priority.BATCH)
        body = await read_body(request, BatchRequest, api_server)
        key_name = getattr(request.state, "key_name", None)
        made = await service.add_batch(tenant_of(request), key_name, body)
        request.state.is_complete = True  # a repeat with the same Idempotency-Key gets this answer
        return json_response(encode(made))

    @router.get(
        "/v1/batches",
        described=operation(None, BatchList, ErrorReply)
        | {"parameters": [AFTER, limit_parameter(MAX_BATCHES)]},
    )
    async def list_batches(request: Request) -> Response:
        """List the batches of the key's tenant, the newest first."""
        data, has_more = await needed(batches).batches(
            tenant_of(request),
            after=request.query_params.get("after"),
            limit=limit_of(request, 20, MAX_BATCHES),
        )
        ids: list[str | None] = [each.id for each in data]
        ids = ids or [None]
        page = BatchList(data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more)
        return json_response(encode(page))

    @router.get("/v1/batches/{batch_id}", described=operation(None, BatchObject, ErrorReply))
    async def batch(request: Request, batch_id: str) -> Response:
        """Describe one batch: its status, how many lines are answered, its files."""
        return json_response(encode(await needed(batches).batch(tenant_of(request), batch_id)))

    @router.post(
        "/v1/batches/{batch_id}/cancel", described=operation(None, BatchObject, ErrorReply)
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch early. Lines without an answer end in its error file."""
        return json_response(encode(await needed(batches).cancel(tenant_of(request), batch_id)))

    return router
