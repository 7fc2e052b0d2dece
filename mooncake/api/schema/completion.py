"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mooncake.api.schema.fields import MAX_ITEMS, Count, GenerationFields, Texts, TokenIds

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields):
    """Continue one or more prompts, given as text or token ids."""

    prompt: (
        str
        | TokenIds
        | Texts
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_ITEMS)]
    )
    logprobs: Count | None = None
    """Return the logprobs of the sampled tokens, and this many most likely ones for each."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [item for item in prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in prompt if not isinstance(item, int)]
