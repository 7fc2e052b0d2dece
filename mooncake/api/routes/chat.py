"""`POST /v1/chat/completions`."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.adapters.chat_call import MessageWriter, new_chat_call
from mooncake.api.api_server import ApiServer
from mooncake.api.errors import ErrorReply
from mooncake.api.generation.generation import Call
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import (
    DONE,
    CallResponse,
    OpenAiRenderer,
    call_id,
    call_usage,
    event,
    tenant_of,
    unless_gone,
)
from mooncake.api.http.router import Router
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatText,
    encode,
)
from mooncake.api.text.answer import Delta


def chat_routes(api_server: ApiServer) -> Router:
    """Return the chat route over `api_server`."""
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

    return router


class ChatRenderer(OpenAiRenderer[ChatRequest]):
    """Writes chat replies and chunks."""

    def __init__(self, api_server: ApiServer, body: ChatRequest) -> None:
        super().__init__(api_server, body)
        self._writer = MessageWriter(body)

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        body = self._body
        prompt_tokens = call.requests[0].prompt_tokens
        prompt_logprobs = deltas[0].prompt_logprobs
        reply = ChatReply(
            id=call.call_id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=[
                ChatChoice(
                    index=delta.index,
                    message=self._writer.whole(delta),
                    logprobs=self._logprobs(delta),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=delta.tokens if body.return_token_ids else UNSET,
                    schema_errors=delta.schema_errors or UNSET,
                )
                for delta in deltas
            ],
            usage=call_usage(call),
            prompt_token_ids=prompt_tokens.tolist() if body.return_token_ids else UNSET,
        )
        if prompt_logprobs is not None:
            reply.prompt_logprobs = self._speller.prompt(prompt_tokens, prompt_logprobs)
        return encode(reply)

    def begin(self, call: Call) -> list[bytes]:
        chunks: list[bytes] = []
        for choice in call.choices:
            text = ChatText(role="assistant", content=self._writer.echo)
            chunk = self._chunk(call, [ChatChunkChoice(choice.index, text, None, None)])
            if self._body.return_token_ids and not chunks:
                chunk.prompt_token_ids = call.requests[0].prompt_tokens.tolist()
            chunks.append(event(encode(chunk)))
        return chunks

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        ended = delta.finish_reason is not None
        told = delta.text or delta.reasoning or delta.tool_calls or delta.logprobs
        if not (told or ended or self._body.return_token_ids):
            return []
        choice = ChatChunkChoice(
            index=delta.index,
            delta=self._writer.added(delta),
            logprobs=self._logprobs(delta) if delta.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if ended else UNSET,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
            schema_errors=delta.schema_errors or UNSET,
        )
        return [event(encode(self._chunk(call, [choice])))]

    def end(self, call: Call) -> list[bytes]:
        if not self._body.include_usage:
            return [DONE]
        chunk = self._chunk(call, [])
        chunk.usage = call_usage(call)
        return [event(encode(chunk)), DONE]

    def _chunk(self, call: Call, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=call.call_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=self._usage_so_far(call),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._speller.chat(delta.tokens, delta.logprobs)
