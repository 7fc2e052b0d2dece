"""Usage figures of a call, finished or still running."""

from __future__ import annotations

from msgspec import UNSET

from mooncake.api.generation import Call
from mooncake.api.schema.replies import CachedTokens, ReasoningTokens, Usage


def call_usage(call: Call, *, num_output_tokens: int | None = None) -> Usage:
    """Return what `call` has cost so far; `num_output_tokens` replaces its own count."""
    output = call.num_output_tokens if num_output_tokens is None else num_output_tokens
    reasoning = call.num_reasoning_tokens
    return Usage(
        prompt_tokens=call.num_prompt_tokens,
        completion_tokens=output,
        total_tokens=call.num_prompt_tokens + output,
        prompt_tokens_details=CachedTokens(call.num_cached_tokens),
        completion_tokens_details=ReasoningTokens(reasoning) if reasoning else UNSET,
    )
