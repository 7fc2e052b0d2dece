"""Turns text into token ids and back, with the files of a checkpoint. Stateless after loading; runs
no code of the checkpoint.

It reads two formats: Kimi-K2's `tiktoken.model` + `tokenizer_config.json`, and a `tokenizer.json`
of the byte-level or byte-fallback kind. Both become one table of the bytes of each token, as
streaming
needs it: a token's bytes never depend on its neighbours.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tiktoken
import tokenizers

from mooncake.base import CheckpointError
from mooncake.base.models.vocabulary import (
    KIMI_K2_PATTERN,
    Vocabulary,
    added_tokens,
    decoder_kind,
    json_vocabulary,
    read_json,
    read_ranks,
    tiktoken_vocabulary,
)

MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""Longer texts, and longer runs of or without white space, are cut before they are encoded, as
Kimi-K2's own tokenizer does: the merge loop is quadratic in the length of a run."""

MAX_COUNTED_CHARS = 1 << 17
"""Longer texts are counted in parts of this many characters if the library would encode them as a
whole: it needs a hundred bytes and more for each token.
"""

_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN_CHARS + 1},}}|(?<!\s)\s{{{MAX_RUN_CHARS + 1},}}")
"""Searched only where a run begins: a search from each of its characters would be quadratic."""


class Window(NamedTuple):
    """The tokens of a text that a reader needs. An encoder may stop once it has one more: it
    returns all tokens of a short text, and those and some more of a long one.
    """

    num_tokens: int
    from_end: bool = False
    """True if the last tokens are needed instead of the first."""


class Tokenizer:
    """What the API server needs from a tokenizer: the bytes of each token, and the special ones."""

    def __init__(
        self, vocabulary: Vocabulary, config: Mapping[str, Any], *, strips_leading_space: bool
    ) -> None:
        """`config` holds the contents of `tokenizer_config.json`, which names tokens."""
        self._table = vocabulary.table
        self.vocab_size = len(self._table)
        """One more than the largest id that has a meaning."""
        self.longest_token = max(map(len, self._table), default=1)
        """The most bytes that one token stands for."""
        self.special_ids = vocabulary.special
        """Ids that are left out of text when special tokens are skipped."""
        self.special_tokens: Mapping[str, str] = _special_tokens(config)
        """The checkpoint's named tokens for templates: bos_token, eos_token, …"""
        self.strips_leading_space = strips_leading_space
        """True if the first token's leading space is an artefact (sentencepiece)."""

    @property
    def eos_token_id(self) -> int | None:
        return self.special_id(self.special_tokens.get("eos_token", ""))

    @property
    def bos_token_id(self) -> int | None:
        return self.special_id(self.special_tokens.get("bos_token", ""))

    def special_id(self, name: str) -> int | None:
        """Return the id of the added token spelled `name`, if there is one."""
        raise NotImplementedError

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = True,
        add_special: bool = False,
        window: Window | None = None,
    ) -> list[int]:
        """Return the ids of `text`, or those that `window` asks for.

        `allow_special`: text that spells a special token becomes that token. `add_special`: add
        the tokens that the checkpoint puts around a text, such as BOS.
        """
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without a meaning."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        special = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in special)
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")


class TiktokenTokenizer(Tokenizer):
    """Kimi-K2's tokenizer: byte-pair ranks, special tokens by name from `tokenizer_config.json`.

    Adds neither BOS nor EOS by itself. Ids after the base ranks that the configuration does not
    name are called `<|reserved_token_ID|>`, as in the checkpoint's own code.
    """

    def __init__(self, ranks: dict[bytes, int], config: Mapping[str, Any]) -> None:
        vocabulary = tiktoken_vocabulary(ranks, config)
        super().__init__(vocabulary, config, strips_leading_space=False)
        self._ids = {name: token_id for token_id, name in vocabulary.added.items()}
        self._encoding = tiktoken.Encoding(
            name="checkpoint",
            pat_str=config.get("pat_str") or KIMI_K2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self._ids,
        )

    def special_id(self, name: str) -> int | None:
        return self._ids.get(name)

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = True,
        add_special: bool = False,
        window: Window | None = None,
    ) -> list[int]:
        del add_special  # these checkpoints add nothing
        pieces = cut_text(text, from_end=window is not None and window.from_end)
        return joined(pieces, lambda piece: self._ids_of(piece, allow_special), window)

    def _ids_of(self, piece: str, allow_special: bool) -> list[int]:
        if allow_special:
            return self._encoding.encode(piece, allowed_special="all")
        return self._encoding.encode_ordinary(piece)


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` whose pieces stand for bytes: byte-level or byte-fallback."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        try:
            self._special_aware = tokenizers.Tokenizer.from_file(str(path))
            self._special_blind = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: {error}") from error
        self._special_blind.encode_special_tokens = True
        for each in (self._special_aware, self._special_blind):
            each.no_truncation()  # the file may keep both from training
            each.no_padding()
        document = read_json(path)
        vocabulary = json_vocabulary(document, path)
        strips = decoder_kind(document, path) == "fallback"
        super().__init__(vocabulary, config, strips_leading_space=strips)
        named = [token["content"] for token in added_tokens(config).values()]
        for name in filter(None, [*named, self.special_tokens.get("bos_token")]):
            if self.special_id(name) is None:
                raise CheckpointError(
                    f"{path}: it lacks the token {name!r:.80}, which tokenizer_config.json names; "
                    "save the tokenizer anew with transformers"
                )

    def special_id(self, name: str) -> int | None:
        token_id: int | None = self._special_aware.token_to_id(name) if name else None
        return token_id

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = True,
        add_special: bool = False,
        window: Window | None = None,
    ) -> list[int]:
        tokenizer = self._special_aware if allow_special else self._special_blind
        if window is not None:
            text = _enough(text, window, lambda piece: len(tokenizer.encode(piece).ids))
        return list(tokenizer.encode(text, add_special_tokens=add_special).ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of the checkpoint directory `path`.

    Raises:
        CheckpointError: no known tokenizer file, or a broken one; the message names the file.
    """
    config = read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # saved by older libraries
        config |= read_json(path / "special_tokens_map.json")
    if (path / "tiktoken.model").is_file():
        return TiktokenTokenizer(read_ranks(path / "tiktoken.model"), config)
    if (path / "tokenizer.json").is_file():
        return JsonTokenizer(path / "tokenizer.json", config)
    raise CheckpointError(
        f"{path}: neither tiktoken.model nor tokenizer.json is there; copy the model's own beside "
        "its weights"
    )


Piece = TypeVar("Piece")


def joined(
    pieces: Iterable[Piece], encode: Callable[[Piece], list[int]], window: Window | None
) -> list[int]:
    """Return the ids of `pieces`, as many from one end as `window` asks for. The pieces come in
    order; if `window` asks for the end, they come in reverse order.
    """
    parts: list[list[int]] = []
    num_tokens = 0
    for piece in pieces:
        parts.append(encode(piece))
        num_tokens += len(parts[-1])
        if window is not None and num_tokens > window.num_tokens:
            break
    from_end = window is not None and window.from_end
    return list(itertools.chain.from_iterable(reversed(parts) if from_end else parts))


def _enough(text: str, window: Window, count: Callable[[str], int]) -> str:
    """Return a part of a long text, from its beginning or end, in which the tokens of `window`
    equal those of the whole text. It has twice as many tokens, and only those at the cut can
    differ.
    """
    num_tokens, size = 0, 0
    while size + MAX_COUNTED_CHARS < len(text):
        piece = text[len(text) - size - MAX_COUNTED_CHARS : len(text) - size]
        if not window.from_end:
            piece = text[size : size + MAX_COUNTED_CHARS]
        num_tokens += count(piece)
        size += MAX_COUNTED_CHARS
        if num_tokens > 2 * window.num_tokens + 1:
            return text[len(text) - size :] if window.from_end else text[:size]
    return text


def cut_text(text: str, *, from_end: bool = False) -> Iterator[str]:
    """Cut `text` where Kimi-K2's tokenizer cuts it before encoding: pieces of at most
    `MAX_ENCODE_CHARS`, runs of at most `MAX_RUN_CHARS`. from_end: the last piece comes first.
    """
    if len(text) <= MAX_RUN_CHARS:
        if text:
            yield text
        return
    starts = range(0, len(text), MAX_ENCODE_CHARS)
    for start in reversed(starts) if from_end else starts:
        part = text[start : start + MAX_ENCODE_CHARS]
        cuts = [
            cut
            for run in _LONG_RUN.finditer(part)
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)
        ]
        bounds = [0, *cuts, len(part)]
        pieces = [part[a:b] for a, b in itertools.pairwise(bounds)]
        yield from reversed(pieces) if from_end else pieces


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a configuration names: `bos_token` and the like, and a model's own."""
    more = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    tokens: dict[str, str] = {}
    for name, value in (named | (more if isinstance(more, dict) else {})).items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
