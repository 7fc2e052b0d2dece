"""`POST /v1/responses`, over the internal chat request. Nothing is stored: the next call may reach
another gateway.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.adapters.chat_call import new_chat_call
from mooncake.api.adapters.openai_responses import PARAMS, ResponseStream, responses_chat
from mooncake.api.adapters.translation import named_as
from mooncake.api.api_server import ApiServer
from mooncake.api.errors import ErrorReply
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import CallResponse, call_id, tenant_of, unless_gone
from mooncake.api.http.router import Router
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.responses import ResponseReply, ResponsesRequest
from mooncake.base import SamplingParams


def responses_routes(api_server: ApiServer) -> Router:
    """Return the responses route over `api_server`."""
    router = Router()

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
            chat = await api_server.tokenizing.run(lambda: responses_chat(body), tenant)
            return chat, await new_chat_call(api_server, chat, name, tenant)

        with named_as(PARAMS):
            chat, call = await unless_gone(request, new_call())
        renderer = new_response_stream(api_server, body, chat, call)
        return CallResponse(api_server, call, renderer, stream=bool(body.stream))

    return router


def new_response_stream(
    api_server: ApiServer, body: ResponsesRequest, chat: ChatRequest, call: Call
) -> ResponseStream:
    """Return the object that writes the response to `body`, which was translated to `chat`, or its
    events.
    """
    speller = None
    if chat.logprobs:
        speller = LogprobSpeller(api_server.model.tokenizer, as_ids=False)
    reply = response_reply(body, call.call_id, call.requests[0].sampling)
    reply.created_at, reply.model = api_server.now_s(), api_server.names[0]
    return ResponseStream(reply, speller)


def response_reply(body: ResponsesRequest, name: str, sampling: SamplingParams) -> ResponseReply:
    """Return a response without output, which repeats the settings of the request."""
    sent = body.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
    text: dict[str, Any] = {"format": {"type": "text"}} | sent.get("text", {})
    return ResponseReply(
        id=name,
        created_at=0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model="",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None} | sent.get("reasoning", {}),
        temperature=sampling.temperature,
        text=text,
        tool_choice=sent.get("tool_choice", "auto"),
        tools=[_NO_TOOL | tool for tool in sent.get("tools", [])],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=sent.get("user"),
    )


_REPEATED = {"text", "reasoning", "tool_choice", "tools", "user"}
"""The fields that a response repeats as they were sent. The input, which may be long, is none."""
_NO_TOOL = {"description": None, "parameters": None, "strict": None}
