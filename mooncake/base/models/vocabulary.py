"""The meaning of each token id, read from the files of a checkpoint: bytes, or a name.

Shared by the API server (text) and the model (grammars). Runs no code from the checkpoint; owns no
state.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.base.errors import CheckpointError

_CASED = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

KIMI_K2_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_CASED}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_CASED}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""The pattern by which Kimi-K2 splits text before merging: runs of Han characters are separate from
other letters (`&&` is class intersection).
"""

NUM_RESERVED_IDS = 256
"""Kimi-K2 reserves this many ids after the base ranks for special tokens, named or not."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens by id."""

    table: list[bytes]
    """The bytes of each token, or the name of an added one; empty for an unused id."""
    added: Mapping[int, str]
    """Names of the tokens that stand for no text; text is never encoded to them by merging."""
    special: frozenset[int]
    """The tokens of `added` that are omitted when special tokens are skipped."""


def tiktoken_vocabulary(ranks: Mapping[bytes, int], config: Mapping[str, Any]) -> Vocabulary:
    """Return the tokens of a `tiktoken.model` and its `tokenizer_config.json`.

    Ids after the base ranks that the configuration does not name are called
    `<|reserved_token_ID|>`, as in Kimi-K2's own code.
    """
    base = max(ranks.values()) + 1
    added = added_tokens(config)
    named = {token_id: token["content"] for token_id, token in added.items()}
    for token_id in range(base, base + NUM_RESERVED_IDS):
        named.setdefault(token_id, f"<|reserved_token_{token_id}|>")
    table = [b""] * (max(named) + 1)
    for token, rank in ranks.items():
        table[rank] = token
    for token_id, name in named.items():
        if token_id >= base:
            table[token_id] = name.encode()
    plain = {token_id for token_id, token in added.items() if not token.get("special", True)}
    return Vocabulary(table, named, frozenset(set(named) - plain))


def json_vocabulary(document: Mapping[str, Any], path: Path) -> Vocabulary:
    """Return the tokens of a `tokenizer.json` whose pieces stand for bytes (byte-level or
    byte-fallback).

    Raises:
        CheckpointError: the file has another kind of tokenizer; the message names `path`.
    """
    to_bytes = _level_bytes if decoder_kind(document, path) == "level" else _fallback_bytes
    added = {int(token["id"]): token for token in document.get("added_tokens") or []}
    pieces = (document.get("model") or {}).get("vocab") or {}
    if isinstance(pieces, list):  # unigram: (piece, score) in the order of ids
        pieces = {piece: token_id for token_id, (piece, _) in enumerate(pieces)}
    table = [b""] * (max([*pieces.values(), *added], default=-1) + 1)
    for piece, token_id in pieces.items():
        table[token_id] = to_bytes(piece)
    for token_id, token in added.items():
        table[token_id] = str(token["content"]).encode()
    return Vocabulary(
        table,
        {token_id: str(token["content"]) for token_id, token in added.items()},
        frozenset(token_id for token_id, token in added.items() if token.get("special")),
    )


def load_vocabulary(path: Path) -> Vocabulary:
    """Read the tokens of the checkpoint directory `path`.

    Raises:
        CheckpointError: no known tokenizer file, or a broken one; the message names the file.
    """
    if (path / "tiktoken.model").is_file():
        config = read_json(path / "tokenizer_config.json")
        return tiktoken_vocabulary(read_ranks(path / "tiktoken.model"), config)
    if (path / "tokenizer.json").is_file():
        return json_vocabulary(read_json(path / "tokenizer.json"), path / "tokenizer.json")
    raise CheckpointError(
        f"{path}: neither tiktoken.model nor tokenizer.json is there; copy the model's own beside "
        "its weights"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}: it is not valid JSON ({error}); copy the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: it is JSON, but not an object; copy the file again")
    return value


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `tiktoken.model`: each line has one base64 token and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(f"{path}: line {number}: {error}") from error
    if not ranks:
        raise CheckpointError(f"{path}: it has no tokens; copy the file again")
    return ranks


def decoder_kind(document: Mapping[str, Any], path: Path) -> str:
    """Return whether pieces are byte-level ("level") or text with byte pieces ("fallback").

    Raises:
        CheckpointError: neither; the message names `path`.
    """
    decoder = document.get("decoder") or {}
    kinds = {step.get("type") for step in [decoder, *(decoder.get("decoders") or [])]}
    if "ByteLevel" in kinds:
        return "level"
    if "ByteFallback" in kinds:
        return "fallback"
    raise CheckpointError(
        f"{path}: decoder {decoder.get('type')!r} is not supported, only byte-level and "
        "byte-fallback tokenizers"
    )


def added_tokens(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that a `tokenizer_config.json` adds, by id. Each has a text as `content`.

    Raises:
        CheckpointError: it has them in another form.
    """
    added = config.get("added_tokens_decoder") or {}
    try:
        return {
            int(token_id): {**token, "content": str(token["content"])}
            for token_id, token in added.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder: {error!r:.200}"
        ) from error


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's printable letters for bytes: printable bytes stand for themselves, the others
    for the letters from U+0100 on, in order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


_LETTERS = _byte_letters()


def _level_bytes(piece: str) -> bytes:
    try:
        return bytes(_LETTERS[letter] for letter in piece)
    except KeyError:
        return piece.encode()


def _fallback_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()
