"""What each field of a request may ask for, and what it is charged: the one table of bounds and
prices.

The checks of the API read their limits here; docs/reference/prices.md is made from it. A bound
limits how long one request delays others on the same gateway or step to a few milliseconds. The
command `python -m benchmarks sampling-fields` measures this on the worker. No state.

If `ApiConfig` sets a limit, that limit is checked; the table has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake.api.config import ApiConfig
from mooncake.base import InvalidRequest
from mooncake.base.large_settings import MAX_SETTINGS_BYTES


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a request may ask for by one field; more gets a 400 that names the field."""

    limit: int
    unit: str
    """What is counted, in the plural."""
    advice: str = "ask for less"

    def check(self, field: str, amount: int) -> None:
        """Raise InvalidRequest, naming `field`, for an amount above the limit."""
        if amount > self.limit:
            raise InvalidRequest(
                f"{field}: {amount} {self.unit} are more than the limit of {self.limit}; "
                f"{self.advice}",
                param=field,
            )


@dataclass(frozen=True, slots=True)
class Price:
    """The bounds of a field and what it is charged."""

    bounds: tuple[Bound, ...] = ()
    pays: str = ""
    """The charge besides one permit for the request, its prompt's tokens and its answer's; "" =
    none.
    """


BAD_WORDS = Bound(256, "words")
BAD_WORD_TOKENS = Bound(4096, "tokens in all spellings of all words", "send fewer or shorter words")
WORD_TOKENS = Bound(32, "tokens in one word", "send a shorter word")
STOP_IDS = Bound(1024, "token ids")
BIASED_IDS = Bound(1024, "token ids")
ALLOWED_IDS = Bound(65_536, "token ids", "exclude tokens by logit_bias or bad_words instead")
CHOICES = Bound(1000, "choices", "list more in a JSON schema's enum")
SETTINGS_BYTES = Bound(
    MAX_SETTINGS_BYTES, "bytes of settings that travel with the request", "make this one smaller"
)
BEAM_WIDTH = Bound(32, "beams", "ask for fewer answers")
BEAM_TOKENS = Bound(
    65_536,
    "tokens of all beams together (beams x max_tokens)",
    "set max_tokens to a smaller number",
)
BEAM_CONTEXT = Bound(
    1 << 20,
    "tokens of all beams' contexts (beams x (prompt + max_tokens))",
    "shorten the prompt, or ask for fewer answers",
)
PROMPT_LOGPROBS = Bound(
    1 << 18,
    "log-probabilities (prompt tokens x (k + 1))",
    "send fewer or shorter prompts, or ask for fewer log-probabilities",
)
PROMPT_IDS = Bound(1 << 18, "token ids of prompts in one reply", "send fewer or shorter prompts")
ANSWER_IDS = Bound(
    1 << 19,
    "token ids of answers in one reply (n x max_tokens)",
    "set max_tokens to a smaller number, or ask for fewer answers",
)
ANSWER_LOGPROBS = Bound(
    1 << 19,
    "log-probabilities (n x max_tokens x (k + 1))",
    "set max_tokens to a smaller number, or ask for fewer log-probabilities",
)

_DEFAULTS = ApiConfig()
_LOGPROBS = Bound(_DEFAULTS.max_logprobs, "log-probabilities for one token")
_CHOICES = Bound(_DEFAULTS.max_choices, "choices for one prompt")
_SEQUENCES = Bound(_DEFAULTS.max_sequences, "sequences in one call (prompts x n)")
_STEPS = "at each step a permit for each beam, and its whole length in tokens of the fair share"

PRICES: Mapping[str, Price] = {
    "n": Price((_CHOICES, _SEQUENCES), "a permit for each choice"),
    "best_of": Price((_CHOICES, _SEQUENCES), "a permit for each choice, and all their tokens"),
    "use_beam_search": Price(
        (BEAM_WIDTH, BEAM_TOKENS, BEAM_CONTEXT),
        f"{_STEPS}; the tokens of all beams",
    ),
    "logprobs": Price((_LOGPROBS, ANSWER_LOGPROBS)),
    "top_logprobs": Price((_LOGPROBS, ANSWER_LOGPROBS)),
    "prompt_logprobs": Price((_LOGPROBS, PROMPT_LOGPROBS), "prompt tokens x (k + 1), once"),
    "return_token_ids": Price((PROMPT_IDS, ANSWER_IDS)),
    "stop": Price(
        (
            Bound(_DEFAULTS.max_stops, "stop strings"),
            Bound(_DEFAULTS.max_stop_chars, "characters in one stop string"),
        )
    ),
    "stop_token_ids": Price((STOP_IDS,)),
    "bad_words": Price((BAD_WORDS, BAD_WORD_TOKENS, WORD_TOKENS)),
    "logit_bias": Price((BIASED_IDS,)),
    "allowed_token_ids": Price((ALLOWED_IDS,)),
    "structured_outputs": Price((SETTINGS_BYTES,)),
    "response_format": Price((SETTINGS_BYTES,)),
    "guided_json": Price((SETTINGS_BYTES,)),
    "guided_regex": Price((SETTINGS_BYTES,)),
    "guided_choice": Price((CHOICES, SETTINGS_BYTES)),
    "guided_grammar": Price((SETTINGS_BYTES,)),
    "tools": Price((SETTINGS_BYTES,)),
}
"""Field -> its price. A field that is missing here is one number or word and is not charged. The
settings of a request (its grammar and its lists of tokens) share `SETTINGS_BYTES`; errors name the
largest one.
"""
