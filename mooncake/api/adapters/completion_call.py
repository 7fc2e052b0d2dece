"""Makes the call that a `CompletionRequest` asks for: one request to continue prompts. No state."""

from __future__ import annotations

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
from mooncake.api.schema.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from mooncake.base import InvalidRequest, SamplingParams


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
