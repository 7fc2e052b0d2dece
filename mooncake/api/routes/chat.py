"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.constraints import Thinking, chat_grammar
from mooncake.api.conversation import render_conversation
from mooncake.api.door import Door
from mooncake.api.generation import Call, Delta
from mooncake.api.http import CallResponse, call_id, read_body
from mooncake.api.logprobs import LogprobSpeller
from mooncake.api.message_parser import Marker, ToolCallDelta, reasoning_is_open
from mooncake.api.routes.usage import call_usage
from mooncake.api.sampling import (
    Wanted,
    fit_output,
    fit_prompt,
    sampling_params,
    text_options,
)
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.openapi import json_body
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
from mooncake.base import InvalidRequest


def chat_routes(door: Door) -> APIRouter:
    """Return the chat route over `door`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        body = await read_body(request, ChatRequest, door.config.max_body_bytes)
        door.check_model(body.model)
        door.check_fields(body)
        call = await _new_call(door, body, call_id("chatcmpl", request, body.request_id))
        renderer = ChatRenderer(door, body)
        return CallResponse(door, call, renderer, stream=bool(body.stream))

    return router


async def _new_call(door: Door, body: ChatRequest, name: str) -> Call:
    _check_chat(body)
    calls = bool(body.tools) and body.tool_choice != "none"
    if calls and not door.tool_markers:
        raise InvalidRequest("tools: this model has no tool-call format we know", param="tools")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        kwargs["documents"] = body.documents
    wanted = _wanted(body)
    sampling = sampling_params(body, wanted, door.model, door.config)
    text = render_conversation(
        door.model.template,
        body.messages,
        body.tools if calls else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        guard=door.guard,
    )
    tokens = await door.encode_chat(text, add_special=bool(body.add_special_tokens))
    tokens = fit_prompt(tokens, body, sampling, door.model)
    sampling = fit_output(len(tokens), sampling, wanted, door.model)
    ids, thinking = _marker_ids(door) if calls else {}, _thinking(door, body, tokens)
    # Checking a large schema takes milliseconds, in which no stream may stutter.
    grammar = await asyncio.to_thread(chat_grammar, body, door.model, ids, thinking)
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    markers = door.think_markers | (door.tool_markers if calls else {})
    max_calls = 1 if body.parallel_tool_calls is False else None
    options = text_options(body, markers=markers, max_calls=max_calls)
    return door.new_call(name, [(tokens, sampling)], body, options)


def _marker_ids(door: Door) -> dict[Marker, int]:
    return {marker: token for token, marker in door.tool_markers.items()}


def _thinking(door: Door, body: ChatRequest, prompt: list[int]) -> Thinking:
    """Return where the model may reason in this answer."""
    if not door.think_markers:
        return Thinking()
    ids = {marker: token for token, marker in door.think_markers.items()}
    begins = door.thinks and not body.continue_final_message and body.thinking is not False
    return Thinking(
        begin=ids[Marker.THINK_BEGIN] if begins else None,
        end=ids[Marker.THINK_END],
        is_open=reasoning_is_open(prompt, door.think_markers),
    )


def _wanted(body: ChatRequest) -> Wanted:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Wanted(
        max_tokens=asked,
        max_tokens_param="max_tokens"
        if body.max_completion_tokens is None
        else "max_completion_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_param="top_logprobs",
        num_prompt_logprobs=body.prompt_logprobs,
    )


def _check_chat(body: ChatRequest) -> None:
    if body.max_tokens == 0 and body.max_completion_tokens is None:
        raise InvalidRequest("max_tokens: must be at least 1", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
        )
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")


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
            prompt_token_ids=prompt_tokens if body.return_token_ids else UNSET,
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
                chunk.prompt_token_ids = call.requests[0].prompt_tokens
            chunks.append(encode(chunk))
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
        return [encode(self._chunk(call, [choice]))]

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
            return []
        chunk = self._chunk(call, [])
        chunk.usage = call_usage(call)
        return [encode(chunk)]

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
