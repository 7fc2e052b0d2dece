"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, over the internal chat request.
Errors have Anthropic's shape (`mooncake.api.errors`).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.adapters.anthropic_messages import PARAMS, MessageStream, messages_chat
from mooncake.api.adapters.chat_call import chat_prompt, new_chat_call
from mooncake.api.adapters.translation import named_as
from mooncake.api.api_server import ApiServer
from mooncake.api.errors import AnthropicError
from mooncake.api.generation.generation import Call
from mooncake.api.generation.sampling import check_counted, counted_window
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import (
    CallResponse,
    call_id,
    json_response,
    tenant_of,
    unless_gone,
)
from mooncake.api.http.router import Router
from mooncake.api.schema.messages import (
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    TokenCount,
)
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import encode


def messages_routes(api_server: ApiServer) -> Router:
    """Return the routes of Anthropic's API over `api_server`."""
    router = Router()

    @router.post(
        "/v1/messages",
        described=operation(MessagesRequest, MessageReply, AnthropicError, stream=True),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation given as blocks, whole or as a stream of events."""
        body = await read_body(request, MessagesRequest, api_server)
        name, tenant = call_id("msg", request, body.request_id), tenant_of(request)

        async def new_call() -> Call:
            # A thousand turns take long.
            chat = await api_server.tokenizing.run(lambda: messages_chat(body), tenant)
            return await new_chat_call(api_server, chat, name, tenant)

        with named_as(PARAMS):
            call = await unless_gone(request, new_call())
        renderer = MessageStream(call, api_server.names[0])
        return CallResponse(api_server, call, renderer, stream=bool(body.stream))

    @router.post(
        "/v1/messages/count_tokens",
        described=operation(CountTokensRequest, TokenCount, AnthropicError),
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of such a message has."""
        body = await read_body(request, CountTokensRequest, api_server)

        def count() -> int:
            window = counted_window(api_server.model)
            tokens = chat_prompt(api_server, messages_chat(body), window)
            check_counted(tokens, api_server.model, "messages")
            return len(tokens)

        with named_as(PARAMS):
            num_tokens = await unless_gone(
                request, api_server.tokenizing.run(count, tenant_of(request))
            )
        return json_response(encode(TokenCount(num_tokens)))

    return router
