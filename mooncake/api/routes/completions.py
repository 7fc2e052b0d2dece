"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.adapters.completion_call import new_completion_call
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
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
    encode,
)
from mooncake.api.text.answer import Delta
from mooncake.base import TokenLogprobs, unpacked_logprobs


def completion_routes(api_server: ApiServer) -> Router:
    """Return the completion route over `api_server`."""
    router = Router()

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

    return router


class CompletionRenderer(OpenAiRenderer[CompletionRequest]):
    """Writes completion replies and chunks. Remembers for each choice how much text it has sent."""

    def __init__(
        self, api_server: ApiServer, body: CompletionRequest, texts: Sequence[str]
    ) -> None:
        super().__init__(api_server, body)
        self._texts = texts
        self._num_per_prompt = body.n or 1
        self._prompt_only = body.max_tokens == 0
        self._offsets: dict[int, int] = {}

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        choices = [self._choice(call, delta) for delta in deltas]
        return encode(self._reply(call, choices, self._usage(call)))

    def begin(self, call: Call) -> list[bytes]:
        del call  # the first chunk of each choice has all there is
        return []

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        choice = self._choice(call, delta)
        told = choice.text or choice.logprobs or choice.finish_reason
        if not (told or self._body.return_token_ids):
            return []
        return [event(encode(self._reply(call, [choice], self._usage_so_far(call))))]

    def end(self, call: Call) -> list[bytes]:
        if not self._body.include_usage:
            return [DONE]
        return [event(encode(self._reply(call, [], self._usage(call)))), DONE]

    def _choice(self, call: Call, delta: Delta) -> CompletionChoice:
        prompt_tokens = call.requests[delta.index].prompt_tokens
        first = delta.index not in self._offsets
        tokens = [] if self._prompt_only else delta.tokens
        text = "" if self._prompt_only else delta.text
        echo = self._texts[delta.index // self._num_per_prompt] if first else ""
        choice = CompletionChoice(
            index=delta.index,
            text=echo + text,
            logprobs=self._logprobs(delta, prompt_tokens, tokens, len(echo), first=first),
            finish_reason=delta.finish_reason
            and ("length" if self._prompt_only else delta.finish_reason),
            stop_reason=None if self._prompt_only else delta.stop_reason,
            token_ids=tokens if self._body.return_token_ids else UNSET,
            prompt_token_ids=prompt_tokens.tolist()
            if first and self._body.return_token_ids and self._is_first(delta)
            else UNSET,
            schema_errors=delta.schema_errors or UNSET,
        )
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = self._speller.prompt(prompt_tokens, delta.prompt_logprobs)
        return choice

    def _is_first(self, delta: Delta) -> bool:
        """Return whether this choice carries the data of its prompt: the first choice of each
        prompt does.
        """
        return delta.index % self._num_per_prompt == 0

    def _logprobs(
        self,
        delta: Delta,
        prompt_tokens: memoryview[int],
        tokens: list[int],
        num_echoed: int,
        *,
        first: bool,
    ) -> CompletionLogprobs | None:
        has_prompt = first and self._body.echo and delta.prompt_logprobs is not None
        offset = self._offsets.setdefault(delta.index, 0 if has_prompt else num_echoed)
        if self._body.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = list(delta.logprobs) if tokens else []
        if has_prompt and delta.prompt_logprobs is not None:
            tokens = prompt_tokens.tolist() + tokens
            entries = unpacked_logprobs(delta.prompt_logprobs) + entries
        columns = self._speller.completion(tokens, entries, offset)
        if tokens:
            self._offsets[delta.index] = columns.text_offset[-1] + len(columns.tokens[-1])
        return columns

    def _reply(
        self, call: Call, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> CompletionReply:
        return CompletionReply(
            id=call.call_id,
            object="text_completion",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )

    def _usage(self, call: Call) -> Usage:
        return call_usage(call, num_output_tokens=0 if self._prompt_only else None)
