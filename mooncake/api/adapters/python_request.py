"""Turns the arguments of `LLM.generate` and `LLM.chat` into the bodies of the HTTP API. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.api.adapters.translation import validated
from mooncake.api.errors import unknown_field
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.sampling_params import SamplingParams
from mooncake.base import InvalidRequest

_NOT_HERE = {
    "echo": "the prompt is in RequestOutput.prompt",
    "stream": "AsyncLLM yields answers while they grow",
    "stream_options": "RequestOutput has the usage",
}
"""Fields of HTTP that have no meaning here -> what to use instead."""


@dataclasses.dataclass(frozen=True)
class PythonRequest:
    """A prompt or a conversation, in the form of the HTTP API."""

    body: CompletionRequest | ChatRequest
    prompt: str | None = None
    """The text of a prompt that is not token ids."""

    @property
    def num_answers(self) -> int:
        return self.body.n or 1

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None and self.body.logprobs is not False


def completion_request(
    prompt: str | Sequence[int], params: SamplingParams | None, fields: Mapping[str, Any]
) -> PythonRequest:
    """Return the request to continue `prompt`, text or token ids.

    `fields` are those of `/v1/completions`; they win over `params`.

    Raises:
        InvalidRequest: a field is unknown or out of range; the message names it.
    """
    text = prompt if isinstance(prompt, str) else None
    given = _set_fields(params) | {"prompt": list(prompt) if text is None else text, **fields}
    return PythonRequest(_body(CompletionRequest, given), text)


def chat_request(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, fields: Mapping[str, Any]
) -> PythonRequest:
    """Return the request to answer a conversation; `fields` are those of `/v1/chat/completions`.

    Raises:
        InvalidRequest: a field is unknown or out of range; the message names it.
    """
    given = _set_fields(params)
    if (count := given.get("logprobs")) is not None:
        given |= {"logprobs": True, "top_logprobs": count}
    return PythonRequest(_body(ChatRequest, given | {"messages": list(messages), **fields}))


def _set_fields(params: SamplingParams | None) -> dict[str, Any]:
    return {} if params is None else params.model_dump(exclude_unset=True, by_alias=True)


def _body(kind: type[Any], given: Mapping[str, Any]) -> Any:
    for name in given.keys() & _NOT_HERE.keys():
        if given[name]:
            raise InvalidRequest(f"{name}: not here; {_NOT_HERE[name]}", param=name)
    body = validated(kind, given)
    for name in body.refuse_unsupported():
        raise unknown_field(name, kind.model_fields)
    return body
