"""Logprobs in the forms that clients know: chat, completions, candidates by id. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Raw

from mooncake.api.schema.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    Logprob,
    PromptLogprobs,
    TokenLogprob,
    encode,
)
from mooncake.api.text.tokenizer import Tokenizer
from mooncake.base import TokenLogprobs, unpacked_logprobs

_PIECE = 512
"""Prompt tokens that are written at a time."""

MAX_SPELLED = 4096
"""Tokens of which a speller keeps text and bytes."""

FLOOR = -9999.0
"""Replaces minus infinity, for which JSON has no number."""


class LogprobSpeller:
    """Writes tokens and logprobs for replies. `as_ids` writes "token_id:N" for a token's text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._spelled: dict[int, tuple[str, list[int]]] = {}
        """token_id -> its text and bytes: most candidates come again and again."""

    def token(self, token_id: int) -> str:
        """Return a token's own text; bytes that are not whole characters become U+FFFD."""
        return self._spell(token_id)[0]

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        spelled = self._spelled.get(token_id)
        if spelled is None:
            data = self._tokenizer.token_bytes(token_id)
            text = data.decode("utf-8", errors="replace")
            spelled = f"token_id:{token_id}" if self._as_ids else text, list(data)
            if len(self._spelled) >= MAX_SPELLED:
                self._spelled.clear()
            self._spelled[token_id] = spelled
        return spelled

    def chat(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the chat form, one entry for each token."""
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

    def by_id(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> PromptLogprobs:
        """Return vLLM's form: for each token the candidates by token id, the token itself first."""
        return [
            None if entry is None else self._candidates(token_id, entry)
            for token_id, entry in zip(tokens, logprobs, strict=True)
        ]

    def prompt(self, tokens: Sequence[int], packed: Raw) -> Raw:
        """Return the same for a whole prompt as JSON, written in pieces: a single JSON text of many
        megabytes would make all other threads wait for Python's lock.
        """
        logprobs = unpacked_logprobs(packed)
        pieces = [
            encode(self.by_id(tokens[at : at + _PIECE], logprobs[at : at + _PIECE]))[1:-1]
            for at in range(0, len(logprobs), _PIECE)
        ]
        return Raw(b"[%b]" % b",".join(pieces))

    def _chat_one(self, token_id: int, entry: TokenLogprobs) -> ChatLogprob:
        text, data = self._spell(token_id)
        top: list[TokenLogprob] = []
        for other, value in entry.top:
            other_text, other_data = self._spell(other)
            top.append(TokenLogprob(other_text, _finite(value), other_data))
        return ChatLogprob(text, _finite(entry.logprob), data, top)

    def _candidates(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        own = Logprob(_finite(entry.logprob), entry.rank, self.token(token_id))
        return {token_id: own} | {
            other: Logprob(_finite(value), rank, self.token(other))
            for rank, (other, value) in enumerate(entry.top, start=1)
        }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR
