"""Makes the call that a `CompletionRequest` asks for, one request to continue prompts, and writes
its answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from mooncake.api.api_server import THREAD_CHARS, THREAD_SEQUENCES, ApiServer
from mooncake.api.constrained.constraints import answer_form, form_constraint
from mooncake.api.generation.generation import Call
from mooncake.api.generation.review import Review
from mooncake.api.generation.sampling import (
    Wanted,
    check_chars,
    check_sequences,
    fit_output,
    fit_prompt,
    prompt_window,
    sampling_params,
    text_options,
    with_grammar,
)
from mooncake.api.http.response import DONE, OpenAiRenderer, call_usage, event
from mooncake.api.schema.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from mooncake.api.schema.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
    encode,
)
from mooncake.api.text.answer import Delta
from mooncake.base import InvalidRequest, SamplingParams, TokenLogprobs, unpacked_logprobs


async def new_completion_call(
    api_server: ApiServer, body: CompletionRequest, name: str, tenant: str = ""
) -> tuple[Call, list[str]]:
    """Return the call that answers `body`, not yet started, and the text to echo for each prompt.

    Raises:
        InvalidRequest: the request contradicts itself, or asks for something that is not possible.
        Unavailable: too many requests wait for the tokenizer or for schemas to be compiled.
    """
    _check_completion(body)
    asked = body.prompts
    check_sequences(len(asked), body, api_server.config)
    if not asked:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    if body.asks_form or body.bad_words:
        # Checking a large schema and many bad words takes milliseconds: no stream may stutter.
        shared, review = await api_server.compiling.run(lambda: _sampling(api_server, body), tenant)
    else:
        shared, review = _sampling(api_server, body)

    def made() -> tuple[Call, list[str]]:
        prompts, texts = _prompts(api_server, body, shared)
        return api_server.new_call(name, prompts, body, text_options(body), review), texts

    num_sequences = len(asked) * max(body.n or 1, body.best_of or 1)
    if sum(map(len, asked)) <= THREAD_CHARS and num_sequences <= THREAD_SEQUENCES:
        return made()
    return await api_server.tokenizing.run(made, tenant)


def _prompts(
    api_server: ApiServer, body: CompletionRequest, shared: SamplingParams
) -> tuple[list[tuple[list[int], SamplingParams]], list[str]]:
    """Return the tokens and the sampling of each prompt, and the text to echo. Slow if prompts are
    long.
    """
    wanted, model = _wanted(body), api_server.model
    window = prompt_window(body, model)
    prompts: list[tuple[list[int], SamplingParams]] = []
    texts: list[str] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                check_chars(len(prompt), model, "prompt")
            special = body.add_special_tokens is not False
            tokens = api_server.encode(prompt, add_special=special, window=window)
        else:
            tokens = prompt
        fitted = fit_prompt(tokens, body, shared, model)
        prompts.append((fitted, fit_output(len(fitted), shared, wanted, model)))
        if not body.echo:
            texts.append("")
        elif isinstance(prompt, str) and fitted is tokens:
            texts.append(prompt)
        else:
            texts.append(model.tokenizer.decode(fitted))
    return prompts, texts


def _sampling(
    api_server: ApiServer, body: CompletionRequest
) -> tuple[SamplingParams, Review | None]:
    """Return the sampling and the review of the answers. Slow if a form or bad words are given."""
    sampling = sampling_params(body, _wanted(body), api_server.model, api_server.config)
    constraint = form_constraint(answer_form(body), api_server.model)
    sampling = with_grammar(sampling, constraint.grammar, constraint.param)
    return sampling, api_server.review(constraint)


def _wanted(body: CompletionRequest) -> Wanted:
    asked_prompt = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if body.echo and body.logprobs is not None:
        asked_prompt.append(body.logprobs)
    return Wanted(
        # With 0 (echo only) one token is made and dropped: scoring the prompt takes a step.
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
