"""Random prompts and lengths that a benchmark sends. Pure: seed in, samples out.

Samples read from files are made in `dataset_files`.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake.base import ConfigError

if TYPE_CHECKING:
    from mooncake.api.text.tokenizer import Tokenizer

Message = dict[str, str]

_WORD = re.compile(rb" [A-Za-z]{2,}")
"""Tokens that stay themselves in any text made of them, so that lengths survive encoding."""
MIN_WORDS = 100
MAX_FITS = 4
"""How often a text is cut or filled at most, until it encodes to the wanted length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str | list[int] | list[Message]
    """The prompt: text, token ids (completions only) or a conversation (chat only)."""
    num_prompt_tokens: int
    """The number of prompt tokens as far as the client knows. The server's count is not used,
    because the server may add a template.
    """
    num_output_tokens: int
    """The largest number of tokens that is asked for."""
    at_s: float | None = None
    """When to send it, in seconds after the beginning, where the dataset says so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomShape:
    """Lengths of random prompts: `prefix` tokens common to all, then `input` tokens of each
    prompt's own.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn evenly from len*(1-ratio) to len*(1+ratio)."""
    prefix_len: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionShape:
    """Prompts that share one of a few prefixes."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128


class PromptSource:
    """Draws random tokens and makes prompts of them: text when there is a tokenizer, else token
    ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        if tokenizer is None:
            self._choices: Sequence[int] = range(1, vocab_size)
        else:
            # The model may know fewer tokens than the tokenizer has names for.
            ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
            words = [i for i in ids if _WORD.fullmatch(tokenizer.token_bytes(i))]
            self._choices = words if len(words) >= MIN_WORDS else ids

    def draw(self, source: random.Random, count: int) -> list[int]:
        return source.choices(self._choices, k=count)

    def prompt(self, source: random.Random, tokens: list[int]) -> tuple[str | list[int], int]:
        """Return the prompt made of `tokens` and how many tokens it encodes to."""
        if self.tokenizer is None:
            return tokens, len(tokens)
        wanted = len(tokens)
        text, ids = self._encoded(tokens)
        for _ in range(MAX_FITS):
            if len(ids) == wanted:
                break
            filler = self.draw(source, wanted - len(ids)) if len(ids) < wanted else []
            text, ids = self._encoded([*ids[:wanted], *filler])
        return text, len(ids)

    def _encoded(self, tokens: list[int]) -> tuple[str, list[int]]:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(tokens)
        return text, self.tokenizer.encode(text)


def random_samples(
    shape: RandomShape, count: int, prompts: PromptSource, seed: int
) -> list[Sample]:
    """Return `count` random prompts.

    Raises:
        ConfigError: the lengths in `shape` contradict each other.
    """
    if not 0 <= shape.range_ratio < 1:
        raise ConfigError(
            f"random-range-ratio: {shape.range_ratio:g} is not at least 0 and below 1"
        )
    source = random.Random(seed)
    prefix = prompts.draw(source, shape.prefix_len)
    samples = []
    for _ in range(count):
        tokens = prefix + prompts.draw(source, _length(source, shape.input_len, shape.range_ratio))
        if not tokens:
            raise ConfigError(
                "random-input-len: a prompt has no token; give a length of at least 1"
            )
        prompt, num_tokens = prompts.prompt(source, tokens)
        samples.append(
            Sample(
                prompt=prompt,
                num_prompt_tokens=num_tokens,
                num_output_tokens=max(1, _length(source, shape.output_len, shape.range_ratio)),
            )
        )
    return samples


def repetition_samples(
    shape: RepetitionShape, count: int, prompts: PromptSource, seed: int
) -> list[Sample]:
    """Return `count` prompts spread evenly over `num_prefixes` prefixes, in random order.

    Raises:
        ConfigError: there are fewer prompts than prefixes.
    """
    if not 1 <= shape.num_prefixes <= count:
        raise ConfigError(
            f"prefix-repetition-num-prefixes: {shape.num_prefixes} prefixes need at least "
            f"{shape.num_prefixes} prompts, and there are {count}; give 1 to {count}"
        )
    source = random.Random(seed)
    prefixes = [prompts.draw(source, shape.prefix_len) for _ in range(shape.num_prefixes)]
    samples = []
    for number in range(count):
        tokens = prefixes[number % shape.num_prefixes] + prompts.draw(source, shape.suffix_len)
        prompt, num_tokens = prompts.prompt(source, tokens)
        samples.append(
            Sample(prompt=prompt, num_prompt_tokens=num_tokens, num_output_tokens=shape.output_len)
        )
    source.shuffle(samples)
    return samples


def _length(source: random.Random, middle: int, ratio: float) -> int:
    return source.randint(math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio)))
