"""The routes that generate: `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses` and
`/v1/messages`, and the count of a message's tokens. The adapters make the calls and write the
replies. A response is not stored: the next call may reach another gateway.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.adapters import anthropic_messages, openai_responses
from mooncake.api.adapters.anthropic_messages import MessageStream, messages_chat
from mooncake.api.adapters.chat_call import ChatRenderer, chat_prompt, new_chat_call
from mooncake.api.adapters.completion_call import CompletionRenderer, new_completion_call
from mooncake.api.adapters.openai_responses import new_response_stream
from mooncake.api.adapters.translation import named_as
from mooncake.api.api_server import ApiServer
from mooncake.api.errors import AnthropicError, ErrorReply
from mooncake.api.generation.generation import Call
from mooncake.api.generation.sampling import check_counted, counted_window
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import CallResponse, call_id, json_response, tenant_of, unless_gone
from mooncake.api.http.router import Router
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.messages import (
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    TokenCount,
)
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import ChatReply, CompletionReply, encode
from mooncake.api.schema.responses import ResponseReply, ResponsesRequest


def generation_routes(api_server: ApiServer) -> Router:
    """Return the routes that generate, over `api_server`."""
    router = Router()

    @router.post(
        "/v1/chat/completions",
        described=operation(ChatRequest, ChatReply, ErrorReply, stream=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        body = await read_body(request, ChatRequest, api_server)
        name = call_id("chatcmpl", request, body.request_id)
        call = await unless_gone(request, new_chat_call(api_server, body, name, tenant_of(request)))
        renderer = ChatRenderer(api_server, body)
        return CallResponse(api_server, call, renderer, stream=bool(body.stream))

    @router.post(
        "/v1/completions",
        described=operation(CompletionRequest, CompletionReply, ErrorReply, stream=True),
    )
    async def completions(request: Request) -> Response:
        """Continue one or more prompts, whole or as a stream of events."""
        body = await read_body(request, CompletionRequest, api_server)
        name = call_id("cmpl", request, body.request_id)
        call, texts = await unless_gone(
            request, new_completion_call(api_server, body, name, tenant_of(request))
        )
        renderer = CompletionRenderer(api_server, body, texts)
        return CallResponse(api_server, call, renderer, stream=bool(body.stream))

    @router.post(
        "/v1/responses",
        described=operation(ResponsesRequest, ResponseReply, ErrorReply, stream=True),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation given as items, whole or as a stream of events."""
        body = await read_body(request, ResponsesRequest, api_server)
        name, tenant = call_id("resp", request, body.request_id), tenant_of(request)

        async def new_call() -> tuple[ChatRequest, Call]:
            # Many items take long.
            chat = await api_server.tokenizing.run(
                lambda: openai_responses.responses_chat(body), tenant
            )
            return chat, await new_chat_call(api_server, chat, name, tenant)

        with named_as(openai_responses.PARAMS):
            chat, call = await unless_gone(request, new_call())
        renderer = new_response_stream(api_server, body, chat, call)
        return CallResponse(api_server, call, renderer, stream=bool(body.stream))

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

        with named_as(anthropic_messages.PARAMS):
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

        with named_as(anthropic_messages.PARAMS):
            num_tokens = await unless_gone(
                request, api_server.tokenizing.run(count, tenant_of(request))
            )
        return json_response(encode(TokenCount(num_tokens)))

    return router
