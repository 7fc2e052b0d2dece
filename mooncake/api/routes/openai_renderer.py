"""What the renderers of chat and completions share. There is one object for each call."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from mooncake.api.api_server import ApiServer
from mooncake.api.errors import error_reply
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.http.response import DONE, event
from mooncake.api.schema.fields import GenerationFields
from mooncake.api.schema.replies import CachedTokens, ReasoningTokens, Usage
from mooncake.base import MooncakeError

Body = TypeVar("Body", bound=GenerationFields)


class OpenAiRenderer(Generic[Body]):
    """The head of every reply, usage, and the last events of a stream."""

    def __init__(self, api_server: ApiServer, body: Body) -> None:
        self._body = body
        self._model = api_server.names[0]
        self._fingerprint = api_server.fingerprint
        self._created = api_server.now_s()
        self._speller = LogprobSpeller(
            api_server.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        """Return the last events of a stream that `error` cut off."""
        del call
        return [event(error_reply(error)), DONE]

    def _usage_so_far(self, call: Call) -> Usage | UnsetType | None:
        """Return the usage for a chunk. It is null except in the last chunk, unless the client
        wants it in all.
        """
        if self._body.continuous_usage:
            return self._usage(call)
        return None if self._body.include_usage else UNSET

    def _usage(self, call: Call) -> Usage:
        return call_usage(call)


def call_usage(call: Call, *, num_output_tokens: int | None = None) -> Usage:
    """Return the tokens of `call` so far; `num_output_tokens` replaces its own count."""
    output = call.num_output_tokens if num_output_tokens is None else num_output_tokens
    reasoning = call.num_reasoning_tokens
    return Usage(
        prompt_tokens=call.num_prompt_tokens,
        completion_tokens=output,
        total_tokens=call.num_prompt_tokens + output,
        prompt_tokens_details=CachedTokens(call.num_cached_tokens, call.cache or UNSET),
        completion_tokens_details=ReasoningTokens(reasoning) if reasoning else UNSET,
    )
