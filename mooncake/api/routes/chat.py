"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.chat_call import new_chat_call
from mooncake.api.door import Door
from mooncake.api.errors import ErrorReply, error_reply
from mooncake.api.generation import Call, Delta
from mooncake.api.http import DONE, CallResponse, call_id, event, read_body
from mooncake.api.logprobs import LogprobSpeller
from mooncake.api.message_parser import ToolCallDelta
from mooncake.api.routes.usage import call_usage
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatText,
    FunctionText,
    ToolCallReply,
    Usage,
    encode,
)
from mooncake.base import MooncakeError


def chat_routes(door: Door) -> APIRouter:
    """Return the chat route over `door`."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=operation(ChatRequest, ChatReply, ErrorReply, stream=True),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        body = await read_body(request, ChatRequest, door.config)
        door.check_model(body.model)
        door.check_fields(body)
        call = await new_chat_call(door, body, call_id("chatcmpl", request, body.request_id))
        renderer = ChatRenderer(door, body)
        return CallResponse(door, call, renderer, stream=bool(body.stream))

    return router


def _tool_call(piece: ToolCallDelta) -> ToolCallReply:
    function = FunctionText(arguments=piece.arguments)
    reply = ToolCallReply(index=piece.index, function=function)
    if piece.call_id is not None and piece.name is not None:
        reply.id, reply.type, function.name = piece.call_id, "function", piece.name
    return reply


class ChatRenderer:
    """Writes chat replies and chunks."""

    def __init__(self, door: Door, body: ChatRequest) -> None:
        self._body = body
        self._model = door.names[0]
        self._fingerprint = door.fingerprint
        self._created = door.now_s()
        self._speller = LogprobSpeller(
            door.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        last = body.messages[-1]
        self._echo = last.text if body.echo and last.role == "assistant" else ""

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
                    message=self._message(delta),
                    logprobs=self._logprobs(delta),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    token_ids=delta.tokens if body.return_token_ids else UNSET,
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
            text = ChatText(role="assistant", content=self._echo)
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
            delta=self._text(delta),
            logprobs=self._logprobs(delta) if delta.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if ended else UNSET,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
        )
        return [event(encode(self._chunk(call, [choice])))]

    def _message(self, delta: Delta) -> ChatText:
        """Return a whole message; its content is null when there are only tool calls."""
        content = self._echo + delta.text
        message = self._text(delta)
        message.role = "assistant"
        message.content = None if delta.tool_calls and not content else content
        for call in message.tool_calls or []:
            call.index = UNSET  # a stream's way to tell calls apart
        return message

    def _text(self, delta: Delta) -> ChatText:
        """Return what a delta adds; reasoning under both names that clients know."""
        text = ChatText()
        if delta.text:
            text.content = delta.text
        if delta.reasoning and self._body.include_reasoning is not False:
            text.reasoning = text.reasoning_content = delta.reasoning
        if delta.tool_calls:
            text.tool_calls = [_tool_call(piece) for piece in delta.tool_calls]
        return text

    def end(self, call: Call) -> list[bytes]:
        if not self._body.include_usage:
            return [DONE]
        chunk = self._chunk(call, [])
        chunk.usage = call_usage(call)
        return [event(encode(chunk)), DONE]

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        del call
        return [event(error_reply(error)), DONE]

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

    def _usage_so_far(self, call: Call) -> Usage | UnsetType | None:
        if self._body.continuous_usage:
            return call_usage(call)
        return None if self._body.include_usage else UNSET

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._speller.chat(delta.tokens, delta.logprobs)
