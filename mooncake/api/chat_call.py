"""One request for an answer to a conversation: all chat APIs are translated to a `ChatRequest`, and
this makes its call. Holds no state.
"""

from __future__ import annotations

import asyncio

import msgspec

from mooncake.api.constraints import Thinking, chat_grammar
from mooncake.api.conversation import render_conversation
from mooncake.api.door import Door
from mooncake.api.generation import Call
from mooncake.api.message_parser import Marker, reasoning_is_open
from mooncake.api.sampling import (
    Wanted,
    fit_output,
    fit_prompt,
    sampling_params,
    text_options,
)
from mooncake.api.schema.chat import ChatRequest
from mooncake.base import InvalidRequest, SamplingParams


async def new_chat_call(door: Door, body: ChatRequest, name: str) -> Call:
    """Return the call that answers `body`, not yet started.

    Raises:
        InvalidRequest: the request contradicts itself, or asks for what cannot be done.
    """
    _check_chat(body)
    calls = bool(body.tools) and body.tool_choice != "none"
    if calls and not door.tool_markers:
        raise InvalidRequest("tools: this model has no tool-call format we know", param="tools")
    # A long conversation or a large schema takes seconds, in which no stream may stutter.
    prompt = await asyncio.to_thread(_prompt, door, body, calls=calls)
    markers = door.think_markers | (door.tool_markers if calls else {})
    max_calls = 1 if body.parallel_tool_calls is False else None
    options = text_options(body, markers=markers, max_calls=max_calls)
    return door.new_call(name, [prompt], body, options)


def _prompt(door: Door, body: ChatRequest, *, calls: bool) -> tuple[list[int], SamplingParams]:
    """Return the conversation's tokens and how the answer to them is sampled."""
    wanted = _wanted(body)
    sampling = sampling_params(body, wanted, door.model, door.config)
    tokens = fit_prompt(chat_prompt(door, body), body, sampling, door.model)
    sampling = fit_output(len(tokens), sampling, wanted, door.model)
    ids, thinking = _marker_ids(door) if calls else {}, _thinking(door, body, tokens)
    grammar = chat_grammar(body, door.model, ids, thinking)
    return tokens, msgspec.structs.replace(sampling, grammar=grammar)


def chat_prompt(door: Door, body: ChatRequest) -> list[int]:
    """Return the tokens of the conversation, as the model reads it. Work for a thread.

    Raises:
        InvalidRequest: the chat template refused it.
    """
    kwargs = body.template_kwargs
    if body.documents is not None:
        kwargs["documents"] = body.documents
    text = render_conversation(
        door.model.template,
        body.messages,
        None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        guard=door.guard,
    )
    return door.encode_chat(text, add_special=bool(body.add_special_tokens))


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
