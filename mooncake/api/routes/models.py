"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.errors import ErrorReply
from mooncake.api.http.response import json_response
from mooncake.api.http.router import Router
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import ModelCard, ModelList, encode


def model_routes(api_server: ApiServer) -> Router:
    """Return the model routes over `api_server`."""
    router = Router()

    @router.get("/v1/models", described=operation(None, ModelList, ErrorReply))
    async def models() -> Response:
        """List the names under which the model is served."""
        return json_response(
            encode(ModelList("list", [_card(api_server, name) for name in api_server.names]))
        )

    @router.get("/v1/models/{name:path}", described=operation(None, ModelCard, ErrorReply))
    async def model(name: str) -> Response:
        """Describe one of these names."""
        api_server.check_model(name)
        return json_response(encode(_card(api_server, name)))

    return router


def _card(api_server: ApiServer, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=api_server.model.created_s,
        owned_by="mooncake",
        root=api_server.model.name,
        parent=None,
        max_model_len=api_server.model.max_model_len,
        permission=[],
    )
