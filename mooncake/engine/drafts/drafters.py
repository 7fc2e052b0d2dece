"""Where drafts come from: tokens that may follow those of a sequence. Pure.

`NgramDrafter` proposes the tokens that followed the same tokens earlier. `ModelDrafter` leaves it
to the runner, which has the model's states: an MTP layer or an EAGLE-3 head makes the drafts. Each
sequence keeps what is known about it in `drafting`; `speculation` decides which drafts are worth
their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mooncake.base.errors import ConfigError
from mooncake.engine.plan import BY_MODEL
from mooncake.engine.sequence import Sequence

NGRAM, MTP, EAGLE3 = METHODS = ("ngram", "mtp", "eagle3")
MOST_DRAFTS = 32
LOOKUP_WINDOW = 1 << 15
"""How many tokens at a sequence's end are searched: about 20 us for one length, at worst 300."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The content of `--speculative-config`; the keys have vLLM's names.

    Raises:
        ConfigError: a value is out of range, or two contradict each other; the message names the
            key.
    """

    method: str
    num_speculative_tokens: int
    """The most drafts of a sequence in one step."""
    prompt_lookup_max: int = 0
    """The most tokens that are looked for; 0: the value of `prompt_lookup_min`, or 5."""
    prompt_lookup_min: int = 0
    """The fewest tokens that must be found again; 0: the value of `prompt_lookup_max`, or 5."""
    model: str = ""
    """The directory of the head, for `eagle3`."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method: {self.method!r} is not one of {', '.join(METHODS)}")
        if self.method != NGRAM and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError(f"prompt_lookup_max: the method {self.method} looks up nothing")
        if not isinstance(self.model, str) or (self.model and self.method != EAGLE3):
            raise ConfigError(f"model: {self.model!r}: the method {self.method} takes none")
        if self.method == EAGLE3 and not self.model:
            raise ConfigError("model: the method eagle3 needs the directory of a head")
        _in_range("num_speculative_tokens", self.num_speculative_tokens, 1)
        _in_range("prompt_lookup_max", self.prompt_lookup_max, 0)
        _in_range("prompt_lookup_min", self.prompt_lookup_min, 0)
        longest, shortest = self.lookup
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min: {shortest} is more than prompt_lookup_max ({longest})"
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """The most and the fewest tokens that are looked for."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        return longest or shortest or 5, shortest or longest or 5


def _in_range(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_DRAFTS:
        raise ConfigError(
            f"{name}: {value!r} is not a whole number of {least or 1} to {MOST_DRAFTS}"
        )


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that may follow the known ones. They may be wrong. Each is
        `BY_MODEL` when the runner is to make it.
        """


class ModelDrafter:
    """Leaves drafts to the runner, which has the model's states."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return `most` drafts that the runner has still to make. In the sequence's first step here
        there are none.
        """
        return [BY_MODEL] * most if sequence.known_to_runner else []


class NgramDrafter:
    """Proposes what followed the last earlier occurrence of a sequence's last tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._longest, self._shortest = config.lookup

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return the tokens after the longest match; of equally long matches, after the last."""
        text = self._text(sequence)
        end = len(text) - 1  # a match ends before the last token
        if text.rfind(text[-self._shortest :], 0, end) < 0:
            return []
        for length in range(min(self._longest, end), self._shortest - 1, -1):
            at = text.rfind(text[-length:], 0, end)
            if at >= 0:
                followed = text[at + length :][:most]
                # The text repeats itself from there, so its end goes on as the text began.
                followed *= -(-most // len(followed))
                return [ord(letter) for letter in followed[:most]]
        return []

    def _text(self, sequence: Sequence) -> str:
        """Return the tokens as letters, because text is searched fast, and only at whole
        letters.
        """
        drafting, num_tokens = sequence.drafting, sequence.num_tokens
        first = max(drafting.num_read, num_tokens - LOOKUP_WINDOW)
        new = "".join(map(chr, sequence.tokens_between(first, num_tokens)))
        drafting.text = (drafting.text + new)[-LOOKUP_WINDOW:]
        drafting.num_read = num_tokens
        return drafting.text


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """Return the drafter for the method of `config`."""
    return NgramDrafter(config) if config.method == NGRAM else ModelDrafter()
