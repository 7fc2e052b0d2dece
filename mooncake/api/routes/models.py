"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from mooncake.api.door import Door
from mooncake.api.errors import ErrorReply
from mooncake.api.http import json_response
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import ModelCard, ModelList, encode


def model_routes(door: Door) -> APIRouter:
    """Return the model routes over `door`."""
    router = APIRouter()

    @router.get("/v1/models", openapi_extra=operation(None, ModelList, ErrorReply))
    async def models() -> Response:
        """List the names under which the model is served."""
        return json_response(encode(ModelList("list", [_card(door, name) for name in door.names])))

    @router.get("/v1/models/{name:path}", openapi_extra=operation(None, ModelCard, ErrorReply))
    async def model(name: str) -> Response:
        """Describe one of them."""
        door.check_model(name)
        return json_response(encode(_card(door, name)))

    return router


def _card(door: Door, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=door.model.created_s,
        owned_by="mooncake",
        root=door.model.name,
        parent=None,
        max_model_len=door.model.max_model_len,
        permission=[],
    )
