"""The tokens of a checkpoint as grammars need them: bytes by id, and how plain text is cut.

They are read before the first request comes. No text leaves this module; the API server has its own
tokenizer. Sets of tokens are bits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
import torch

from mooncake.base.models.vocabulary import KIMI_K2_PATTERN, load_vocabulary, read_json, read_ranks


@dataclass(frozen=True)
class GrammarTokens:
    """All tokens by id, and the model's own way to write a text with them."""

    table: list[bytes]
    added: Collection[int]
    """Tokens that stand for no text."""
    encode: Callable[[str], list[int]]


def load_grammar_tokens(path: Path) -> GrammarTokens:
    """Read the tokens of the checkpoint directory `path`.

    Raises:
        CheckpointError: no known tokenizer file, or a broken one; the message names the file.
    """
    vocabulary = load_vocabulary(path)
    if (path / "tiktoken.model").is_file():
        encoding = tiktoken.Encoding(
            name="grammar",
            pat_str=read_json(path / "tokenizer_config.json").get("pat_str") or KIMI_K2_PATTERN,
            mergeable_ranks=read_ranks(path / "tiktoken.model"),
            special_tokens={},
        )
        return GrammarTokens(vocabulary.table, vocabulary.added.keys(), encoding.encode_ordinary)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # the file may keep both from training
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return GrammarTokens(vocabulary.table, vocabulary.added.keys(), encode)


def num_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 8)


def bits_of(tokens: Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return these tokens of a vocabulary as uint8 [num_bytes], one bit for each token, the lowest
    first. Bits beyond the vocabulary are 0. Masks of logits are made from them.
    """
    marks = np.zeros(vocab_size, dtype=np.bool_)
    marks[np.asarray(tokens, dtype=np.int64)] = True
    return torch.from_numpy(np.packbits(marks, bitorder="little"))
