"""Sampling settings that may be large: a grammar, lists of tokens, a bias for many of them.

The sequences of one call have them in common, and often so have the calls of one client. So they
are named by their content, and travel to each worker once (`messages.RequestTask`).
"""

from __future__ import annotations

import hashlib

import msgspec

from mooncake.base.grammar import Grammar
from mooncake.base.sampling import SamplingParams

MIN_NAMED_BYTES = 4096
"""Smaller settings travel with each request: a name would save little."""

MAX_SETTINGS_BYTES = 4 << 20
"""Of the large settings of one request, by `settings_bytes`: the API server refuses more, so that
what gateways and workers keep has room for those of several clients."""

Setting = Grammar | dict[int, float] | list[int] | frozenset[int] | list[list[int]]


class SettingName(msgspec.Struct, frozen=True, array_like=True):
    """A setting by its content."""

    digest: bytes
    num_bytes: int
    """Of memory, about."""


class LargeSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of some of these fields of `SamplingParams`; None = not among them."""

    grammar: Grammar | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: frozenset[int] | None = None
    bad_words: list[list[int]] | None = None


LARGE_SETTINGS = LargeSettings.__struct_fields__

_ENCODER = msgspec.msgpack.Encoder()
_CHAR_BYTES, _INT_BYTES, _ENTRY_BYTES, _LIST_BYTES = 4, 40, 160, 64
"""Bytes of memory of a character, an int in a list, an int with its float in a dictionary, and of
an empty list: at most, so that what is bounded by them keeps its bound."""


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
