"""Logprobs in the three shapes clients know: chat, completions, prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mooncake.api.schema.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from mooncake.api.tokenizer import Tokenizer
from mooncake.base import TokenLogprobs

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobSpeller:
    """Spells tokens and probabilities for replies. `as_ids` writes "token_id:N" for token texts."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def token(self, token_id: int) -> str:
        """Return a token's own text; bytes that are no whole characters become U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the chat form, one entry a token."""
        return ChatLogprobs([self._chat_one(*pair) for pair in zip(tokens, logprobs, strict=True)])

    def completion(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        text_offset: int,
    ) -> CompletionLogprobs:
        """Return the completion form; `text_offset` is where the first token's text starts.

        An entry without logprobs (the first of a prompt) gets null, as OpenAI's echo has it.
        """
        columns = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(tokens, logprobs, strict=True):
            text = self.token(token_id)
            columns.tokens.append(text)
            columns.text_offset.append(text_offset)
            text_offset += len(text)
            if entry is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            columns.token_logprobs.append(_finite(entry.logprob))
            top = {self.token(other): _finite(value) for other, value in entry.top}
            top.setdefault(text, _finite(entry.logprob))
            columns.top_logprobs.append(top)
        return columns

    def prompt(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> PromptLogprobs:
        """Return vLLM's form: for each prompt position candidates by token id."""
        return [
            None if entry is None else self._prompt_one(token_id, entry)
            for token_id, entry in zip(tokens, logprobs, strict=True)
        ]

    def _chat_one(self, token_id: int, entry: TokenLogprobs) -> ChatLogprob:
        return ChatLogprob(
            token=self.token(token_id),
            logprob=_finite(entry.logprob),
            bytes=list(self._tokenizer.token_bytes(token_id)),
            top_logprobs=[
                TokenLogprob(
                    self.token(other), _finite(value), list(self._tokenizer.token_bytes(other))
                )
                for other, value in entry.top
            ],
        )

    def _prompt_one(self, token_id: int, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        candidates = {
            str(other): PromptLogprob(_finite(value), rank, self.token(other))
            for rank, (other, value) in enumerate(entry.top, start=1)
        }
        own = PromptLogprob(_finite(entry.logprob), entry.rank, self.token(token_id))
        return {str(token_id): own} | candidates


def _finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR
