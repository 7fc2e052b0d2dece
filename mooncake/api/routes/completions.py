"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.constraints import answer_form, form_grammar
from mooncake.api.door import Door
from mooncake.api.errors import ErrorReply, error_reply
from mooncake.api.generation import Call, Delta
from mooncake.api.http import DONE, CallResponse, call_id, event, read_body
from mooncake.api.logprobs import LogprobSpeller
from mooncake.api.routes.usage import call_usage
from mooncake.api.sampling import (
    Wanted,
    check_ids,
    check_sequences,
    fit_output,
    fit_prompt,
    sampling_params,
    text_options,
)
from mooncake.api.schema.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
    encode,
)
from mooncake.base import InvalidRequest, MooncakeError, SamplingParams, TokenLogprobs


def completion_routes(door: Door) -> APIRouter:
    """Return the completion route over `door`."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        openapi_extra=operation(CompletionRequest, CompletionReply, ErrorReply, stream=True),
    )
    async def completions(request: Request) -> Response:
        """Go on with one or more prompts, whole or as a stream of events."""
        body = await read_body(request, CompletionRequest, door.config)
        door.check_model(body.model)
        door.check_fields(body)
        _check_completion(body)
        prompts, texts = await _prompts(door, body)
        call = door.new_call(
            call_id("cmpl", request, body.request_id), prompts, body, text_options(body)
        )
        renderer = CompletionRenderer(door, body, texts)
        return CallResponse(door, call, renderer, stream=bool(body.stream))

    return router


async def _prompts(
    door: Door, body: CompletionRequest
) -> tuple[list[tuple[list[int], SamplingParams]], list[str]]:
    """Return (tokens and sampling, text to echo) of every prompt."""
    wanted = _wanted(body)
    asked = body.prompts
    check_sequences(len(asked), body, door.config)
    shared = msgspec.structs.replace(
        sampling_params(body, wanted, door.model, door.config),
        # Checking a large schema takes milliseconds, in which no stream may stutter.
        grammar=await asyncio.to_thread(lambda: form_grammar(answer_form(body), door.model)),
    )
    if not asked:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    prompts: list[tuple[list[int], SamplingParams]] = []
    texts: list[str] = []
    for prompt in asked:
        if isinstance(prompt, str):
            tokens = await door.encode(prompt, add_special=body.add_special_tokens is not False)
            await asyncio.sleep(0)  # others' turn: there may be a thousand of these
        else:
            check_ids("prompt", prompt, door.model)
            tokens = prompt
        fitted = fit_prompt(tokens, body, shared, door.model)
        prompts.append((fitted, fit_output(len(fitted), shared, wanted, door.model)))
        if not body.echo:
            texts.append("")
        elif isinstance(prompt, str) and fitted is tokens:
            texts.append(prompt)
        else:
            texts.append(door.model.tokenizer.decode(fitted))
    return prompts, texts


def _wanted(body: CompletionRequest) -> Wanted:
    asked_prompt = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if body.echo and body.logprobs is not None:
        asked_prompt.append(body.logprobs)
    return Wanted(
        # With 0 (echo only) one token is made and dropped: it takes a step to score the prompt.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        max_tokens_param="max_tokens",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
        logprobs_param="logprobs",
        num_prompt_logprobs=max(asked_prompt, default=None),
    )


def _check_completion(body: CompletionRequest) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "max_tokens: must be at least 1 (0 is for echo=true, to score a prompt)",
            param="max_tokens",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
        )


class CompletionRenderer:
    """Writes completion replies and chunks. Remembers for each choice how much text it has sent."""

    def __init__(self, door: Door, body: CompletionRequest, texts: Sequence[str]) -> None:
        self._body = body
        self._model = door.names[0]
        self._fingerprint = door.fingerprint
        self._created = door.now_s()
        self._texts = texts
        self._num_per_prompt = body.n or 1
        self._prompt_only = body.max_tokens == 0
        self._speller = LogprobSpeller(
            door.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._offsets: dict[int, int] = {}

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        choices = [self._choice(call, delta) for delta in deltas]
        return encode(self._reply(call, choices, self._usage(call)))

    def begin(self, call: Call) -> list[bytes]:
        del call  # the first chunk of each choice says all there is
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

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        del call
        return [event(error_reply(error)), DONE]

    def _choice(self, call: Call, delta: Delta) -> CompletionChoice:
        prompt_tokens = call.requests[delta.index].prompt_tokens
        first = delta.index not in self._offsets
        tokens = [] if self._prompt_only else delta.tokens
        text = "" if self._prompt_only else delta.text
        echo = self._texts[delta.index // self._num_per_prompt] if first else ""
        choice = CompletionChoice(
            index=delta.index,
            text=echo + text,
            logprobs=self._logprobs(delta, prompt_tokens, tokens, first=first),
            finish_reason=delta.finish_reason
            and ("length" if self._prompt_only else delta.finish_reason),
            stop_reason=None if self._prompt_only else delta.stop_reason,
            token_ids=tokens if self._body.return_token_ids else UNSET,
            prompt_token_ids=prompt_tokens.tolist()
            if first and self._body.return_token_ids
            else UNSET,
        )
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice.prompt_logprobs = self._speller.prompt(prompt_tokens, delta.prompt_logprobs)
        return choice

    def _logprobs(
        self, delta: Delta, prompt_tokens: memoryview[int], tokens: list[int], *, first: bool
    ) -> CompletionLogprobs | None:
        offset = self._offsets.setdefault(delta.index, 0)
        if self._body.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = list(delta.logprobs) if tokens else []
        if first and self._body.echo and delta.prompt_logprobs is not None:
            tokens = prompt_tokens.tolist() + tokens
            entries = delta.prompt_logprobs + entries
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

    def _usage_so_far(self, call: Call) -> Usage | UnsetType | None:
        if self._body.continuous_usage:
            return self._usage(call)
        return None if self._body.include_usage else UNSET
