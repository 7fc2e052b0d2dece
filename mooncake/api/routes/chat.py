"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.conversation import render_conversation
from mooncake.api.door import Door
from mooncake.api.generation import Call, Delta
from mooncake.api.http import CallResponse, call_id, read_body
from mooncake.api.logprobs import LogprobSpeller
from mooncake.api.routes.usage import call_usage
from mooncake.api.sampling import Wanted, fit_output, fit_prompt, sampling_params
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.openapi import json_body
from mooncake.api.schema.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatText,
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
    kwargs = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        kwargs["documents"] = body.documents
    wanted = _wanted(body)
    sampling = sampling_params(body, wanted, door.model, door.config)
    text = render_conversation(
        door.model.template,
        body.messages,
        None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
    )
    tokens = await door.encode(text, add_special=bool(body.add_special_tokens))
    tokens = fit_prompt(tokens, body, sampling, door.model)
    sampling = fit_output(len(tokens), sampling, wanted, door.model)
    return door.new_call(name, [(tokens, sampling)], body)


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
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest("tools: calling tools is not supported yet", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")


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
                    message=ChatText(role="assistant", content=self._echo + delta.text),
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
        if not (delta.text or delta.logprobs or ended or self._body.return_token_ids):
            return []
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatText(content=delta.text) if delta.text else ChatText(),
            logprobs=self._logprobs(delta) if delta.tokens else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if ended else UNSET,
            token_ids=delta.tokens if self._body.return_token_ids else UNSET,
        )
        return [encode(self._chunk(call, [choice]))]

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
