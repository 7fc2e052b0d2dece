"""Grammars over the tiny tokenizer, and answers checked against them letter by letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake.api.text.answer import TOOL_MARKERS, Marker
from mooncake.base import Grammar
from mooncake.model.grammars.following import Follower, Grammars
from mooncake.model.grammars.grammar_tokens import GrammarTokens
from tests.support.api.server import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SECTION, SECTION_END, CALL, ARGUMENT, CALL_END = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
END = "<|im_end|>"


def special(name: str) -> int:
    token = TOKENIZER.special_id(name)
    assert token is not None
    return token


def tiny_tokens() -> GrammarTokens:
    """Return the tokens of the tiny tokenizer."""
    table = [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)]
    added = list(range(special("[BOS]"), TOKENIZER.vocab_size))
    return GrammarTokens(table, added, lambda text: TOKENIZER.encode(text, allow_special=False))


def tiny_grammars(limit_s: float = 30.0) -> Grammars:
    return Grammars(TOKENIZER.vocab_size, tiny_tokens, limit_s)


def marker_ids() -> Mapping[Marker, int]:
    return {marker: special(marker.value) for marker in TOOL_MARKERS}


def grammar_of(rule: str, **fields: Any) -> Grammar:
    """Return the grammar of an answer that is `rule`."""
    return Grammar(text=f"start: answer\nanswer: {rule}", end_ids=[special(END)], **fields)


def allowed_next(follower: Follower) -> set[int] | None:
    """Return the tokens that may come next, None = all."""
    allowed = follower.allowed()
    if allowed is None:
        return None
    marks = np.unpackbits(allowed.numpy(), count=TOKENIZER.vocab_size, bitorder="little")
    return set(marks.nonzero()[0].tolist())


def refused_at(grammars: Grammars, grammar: Grammar, tokens: Sequence[int]) -> int | None:
    """Return the place of the first of `tokens` that the grammar does not allow, None = none."""
    follower = grammars.follow(grammar, [])
    for place, token in enumerate(tokens):
        allowed = allowed_next(follower)
        if allowed is not None and token not in allowed:
            return place
        follower.advance(token)
    return None
