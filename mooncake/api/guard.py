"""Keeps what people and tools write from becoming control tokens. Pure.

A chat template puts their text between control tokens and the result is tokenized as a whole, so a
message that spells `<|im_end|>` would end its turn and could speak in another role. Here such
spellings are broken by an invisible mark before the template is rendered, and mended, as plain
text, after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from mooncake.api.tokenizer import Tokenizer

MARK = "\ue0c3"
"""A private-use character; it never reaches the model."""

_UNTRUSTED_ROLES = frozenset({"user", "tool"})


class Guard:
    """Breaks the spellings of a tokenizer's control tokens in text, and encodes around them."""

    def __init__(self, tokenizer: Tokenizer, soft_names: Collection[str]) -> None:
        """`soft_names`: tokens that a model writes into its own text, such as `<think>`. They are
        plain text in what users and tools say, and stay tokens in an assistant's turns."""
        self._tokenizer = tokenizer
        hard = {
            tokenizer.token_bytes(token).decode("utf-8", "replace")
            for token in tokenizer.special_ids
        } - {""}
        self._hard = _any_of(hard - set(soft_names))
        self._all = _any_of(hard | set(soft_names))

    def turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message for the template with its control-token spellings broken."""
        pattern = self._all if message.get("role") in _UNTRUSTED_ROLES else self._hard
        role = message.get("role")
        return {**_broken(dict(message), pattern), "role": role}

    def value(self, value: Any) -> Any:
        """Return tools, documents or template settings with the spellings broken."""
        return _broken(value, self._all)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the ids of a rendered text; what was broken becomes plain text."""
        if MARK not in text:
            return self._tokenizer.encode(text, add_special=add_special)
        ids = self._tokenizer.encode("", add_special=add_special)
        plain: list[str] = []
        # No control token holds a mark, so those between marks are found piece by piece: one search
        # of a text that is full of broken ones would stop all other threads for seconds.
        for piece in text.split(MARK):
            end = 0
            for found in self._all.finditer(piece):
                token = self._tokenizer.special_id(found[0])
                if token is not None:
                    plain.append(piece[end : found.start()])
                    ids += self._tokenizer.encode("".join(plain), allow_special=False)
                    ids.append(token)
                    plain, end = [], found.end()
            plain.append(piece[end:])
        return ids + self._tokenizer.encode("".join(plain), allow_special=False)


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    """Match any of `names`, longest first."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _broken(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], value)
    if isinstance(value, list):
        return [_broken(item, pattern) for item in value]
    if isinstance(value, dict):
        return {_broken(key, pattern): _broken(item, pattern) for key, item in value.items()}
    return value
