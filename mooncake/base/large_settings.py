"""Sampling settings that may be large: a grammar, lists of tokens, a bias for many tokens.

The sequences of one call share them, and often the calls of one client do. So each setting has a
name made from its content, and travels to each worker once (`messages.RequestTask`).
"""

from __future__ import annotations

import hashlib

import msgspec

from mooncake.base.grammar import Grammar
from mooncake.base.sampling import SamplingParams

MIN_NAMED_BYTES = 4096
"""A smaller setting travels with each request, because a name would save little."""

MAX_SETTINGS_BYTES = 4 << 20
"""The bound on the large settings of one request, by `settings_bytes`. The API server refuses a
request with more, so that gateways and workers have room for the settings of several clients.
"""

Setting = Grammar | dict[int, float] | list[int] | frozenset[int] | list[list[int]]


class SettingName(msgspec.Struct, frozen=True, array_like=True):
    """A setting by its content."""

    digest: bytes
    num_bytes: int
    """About how much memory the setting takes."""


class LargeSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The large fields of `SamplingParams`. None: the field is not among those sent."""

    grammar: Grammar | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: frozenset[int] | None = None
    bad_words: list[list[int]] | None = None


LARGE_SETTINGS = LargeSettings.__struct_fields__

_ENCODER = msgspec.msgpack.Encoder()
_CHAR_BYTES, _INT_BYTES, _ENTRY_BYTES, _LIST_BYTES = 4, 40, 160, 64
"""How many bytes a character, an int in a list, an int with its float in a dictionary, and an empty
list take at most. They must not be too small, because bounds on memory are computed from them.
"""


def setting_bytes(sampling: SamplingParams) -> dict[str, int]:
    """Return about how much memory each setting that may be large takes, by field."""
    values = {name: getattr(sampling, name) for name in LARGE_SETTINGS}
    return {name: _num_bytes(value) for name, value in values.items() if value is not None}


def large_settings(sampling: SamplingParams) -> dict[str, Setting]:
    """Return the settings of `sampling` that are worth a name, by field."""
    sizes = setting_bytes(sampling)
    return {name: getattr(sampling, name) for name in sizes if sizes[name] >= MIN_NAMED_BYTES}


def name_setting(field: str, value: Setting) -> SettingName:
    """Return the name of a setting: equal values of one field have equal names."""
    ordered = sorted(value) if isinstance(value, frozenset) else value
    content = field.encode() + b"\0" + _ENCODER.encode(ordered)
    digest = hashlib.blake2b(content, digest_size=24).digest()
    return SettingName(digest, _num_bytes(value))


def _num_bytes(value: Setting) -> int:
    """Return about how much memory a setting takes."""
    if isinstance(value, Grammar):
        return (
            len(value.text) * (1 if value.text.isascii() else _CHAR_BYTES)
            + (len(value.end_ids) + len(value.triggers)) * _INT_BYTES
        )
    if isinstance(value, dict):
        return len(value) * _ENTRY_BYTES
    if isinstance(value, list) and value and isinstance(value[0], list):
        return sum(_LIST_BYTES + _INT_BYTES * len(word) for word in value if isinstance(word, list))
    return len(value) * _INT_BYTES
