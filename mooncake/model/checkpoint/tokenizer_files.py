"""Tokenizer and chat files of a preset checkpoint, in the form in which Kimi-K2 ships them.

Pure text and bytes: `tiktoken.model` (a byte-level BPE learned from `tokenizer_corpus`),
`tokenizer_config.json` with K2's special tokens by name, and its turn format as a jinja template.
"""

from __future__ import annotations

import base64
import functools
import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from mooncake.base import ConfigError
from mooncake.model.checkpoint.tokenizer_corpus import weighted_pieces

VOCABULARY_NAME = "tiktoken.model"

JSON_JOINTS = (
    'parameters":{"type":"object","properties":{"', 'type":"function","function":{"name":"',
    'description":"', '":{"type":"', '":{}}}},{"', '":{}}}}]', '"]}}},{"', '"]}},"', '"]}}}]',
    '"}}},"', '}}},{"', '": ["', '": {"', '"], "', '"]},"', '"}},"', '", "', '": "', '": [',
    '":["', '":{"', '"],"', '"},"', '], "', '}, "', '","', '": ', '":"', '"]}', ', "', '[{"',
    '":', '"}', '{"',
)  # fmt: skip
"""The text between the words of JSON, longest first."""

CHARACTERS_PATTERN = "|".join([*map(re.escape, JSON_JOINTS), r"\p{Lu}?\p{Ll}+", r"[\s\S]"])
"""Splits text into JSON's joints, words and single characters. With a vocabulary of only whole
words and characters, any other word becomes its letters, the same ones wherever it stands. So a
small model can copy it.
"""

NUM_SPECIAL = 256
"""The number of slots after the base vocabulary. Those without a name are
`<|reserved_token_{id}|>`.
"""

SPECIAL_TOKENS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Name -> offset after the base vocabulary, which holds 163,584 tokens in Kimi-K2."""

_NOT_SPECIAL = ("<think>", "</think>")
"""Added tokens that are part of the text. They are kept when special tokens are skipped."""

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is iterable -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- if not messages or messages[0].role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
<|im_user|>{{ message.name or 'user' }}<|im_middle|>{{ text_of(message.content) }}
  {%- elif message.role == 'assistant' -%}
<|im_assistant|>{{ message.name or 'assistant' }}<|im_middle|>{{ text_of(message.content) }}
    {%- if message.tool_calls -%}
<|tool_calls_section_begin|>
      {%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {%- if call.function.arguments is string -%}{{ call.function.arguments }}
        {%- else -%}{{ call.function.arguments | tojson }}
        {%- endif -%}
<|tool_call_end|>
      {%- endfor -%}
<|tool_calls_section_end|>
    {%- endif -%}
  {%- elif message.role == 'tool' -%}
<|im_system|>{{ message.name or 'tool' }}<|im_middle|>
    {{- '## Return of ' ~ message.tool_call_id ~ '\\n' ~ text_of(message.content) }}
  {%- else -%}
<|im_system|>{{ message.name or message.role }}<|im_middle|>{{ text_of(message.content) }}
  {%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""


def special_token_id(name: str, num_base: int) -> int:
    """Return the id of K2's special token `name` when the base vocabulary has `num_base` tokens."""
    return num_base + SPECIAL_TOKENS[name]


def train_ranks(num_base: int) -> list[bytes]:
    """Return `num_base` byte strings, most basic first: the 256 bytes, then merges by frequency.

    The place in the list is the token's rank and id, as tiktoken reads them. Deterministic: among
    equal pairs, the one with the lower ids wins.

    Raises:
        ConfigError: `num_base` is under 256, or more than the text can fill.
    """
    if num_base < 256:
        raise ConfigError(f"a byte-level vocabulary needs 256 tokens or more, not {num_base}")
    trainer = _BpeTrainer(weighted_pieces())
    while len(trainer.tokens) < num_base:
        if not trainer.merge_best():
            raise ConfigError(f"the text gives {len(trainer.tokens)} tokens at most")
    return trainer.tokens


@functools.cache
def _learned(num_base: int) -> tuple[bytes, ...]:
    """Return what `train_ranks` learns, in a second, once for all checkpoints of a process."""
    return tuple(train_ranks(num_base))


class _BpeTrainer:
    """Byte-pair merges over weighted pieces. Pair counts are kept up to date merge by merge."""

    def __init__(self, pieces: Iterable[tuple[bytes, int]]) -> None:
        self.tokens = [bytes((byte,)) for byte in range(256)]
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        totals: dict[bytes, int] = defaultdict(int)
        for piece, count in pieces:
            totals[piece] += count
        self._pieces = [list(piece) for piece in totals]
        self._weights = list(totals.values())
        self._counts: dict[tuple[int, int], int] = defaultdict(int)
        self._where: dict[tuple[int, int], set[int]] = defaultdict(set)
        for number, symbols in enumerate(self._pieces):
            self._count(number, symbols, 1)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def merge_best(self) -> bool:
        """Merge the most frequent pair everywhere. Returns False when no pair is left."""
        while self._heap:
            count, pair = heapq.heappop(self._heap)
            if -count == self._counts.get(pair, 0) and count:
                self._merge(pair)
                return True
        return False

    def _merge(self, pair: tuple[int, int]) -> None:
        joined = self.tokens[pair[0]] + self.tokens[pair[1]]
        # Two pairs can spell one token; it keeps the rank it got first.
        merged = self._ids.setdefault(joined, len(self.tokens))
        if merged == len(self.tokens):
            self.tokens.append(joined)
        touched: dict[tuple[int, int], None] = {}
        for number in sorted(self._where.pop(pair)):
            old = self._pieces[number]
            new = _joined(old, pair, merged)
            if len(new) == len(old):
                continue
            self._count(number, old, -1)
            self._count(number, new, 1)
            self._pieces[number] = new
            touched.update(dict.fromkeys(pairwise(old)))
            touched.update(dict.fromkeys(pairwise(new)))
        for other in touched:
            if self._counts[other] > 0:
                heapq.heappush(self._heap, (-self._counts[other], other))

    def _count(self, number: int, piece: list[int], sign: int) -> None:
        weight = sign * self._weights[number]
        for pair in pairwise(piece):
            self._counts[pair] += weight
            if sign > 0:
                self._where[pair].add(number)


def _joined(piece: list[int], pair: tuple[int, int], merged: int) -> list[int]:
    joined = []
    place = 0
    while place < len(piece):
        if tuple(piece[place : place + 2]) == pair:
            joined.append(merged)
            place += 2
        else:
            joined.append(piece[place])
            place += 1
    return joined


def tokenizer_config(num_base: int, pattern: str = "") -> dict[str, Any]:
    """Return `tokenizer_config.json`: K2's special tokens by name, at their offsets.

    pattern: the regular expression that splits text before tokens are merged; empty means
    Kimi-K2's.
    """
    added = {
        str(special_token_id(name, num_base)): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _NOT_SPECIAL,
        }
        for name in SPECIAL_TOKENS
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            name for name in SPECIAL_TOKENS if name.startswith("<|") or name == "[EOT]"
        ],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": CHAT_TEMPLATE,
        **({"pat_str": pattern} if pattern else {}),
    }


def write_tokenizer_files(
    out: Path, num_base: int, vocabulary: Path | None = None, pattern: str = ""
) -> None:
    """Write `tiktoken.model`, `tokenizer_config.json` and `chat_template.jinja` into `out`.

    vocabulary: a `tiktoken.model` to use; without one, it is learned. pattern: see
    `tokenizer_config`.
    """
    if vocabulary is None:
        ranked = enumerate(_learned(num_base))
        learned = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in ranked)
    else:
        learned = vocabulary.read_bytes()
    (out / VOCABULARY_NAME).write_bytes(learned)
    text = json.dumps(tokenizer_config(num_base, pattern), indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
