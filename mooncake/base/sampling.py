"""Sampling parameters of one request, already validated by the API server."""

from __future__ import annotations

import msgspec

from mooncake.base.grammar import Grammar


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request; names and defaults are those of the OpenAI API and vLLM.

    A sampled token depends only on `seed`, its position in the output, and the distribution, so a
    request can be resumed on another worker and continues with the same tokens. The API server
    draws `seed` when the client gave none. Stop *strings* are text and therefore handled in `api`;
    `stop_token_ids` are tokens and handled by the engine.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    """Empty = all."""
    seed: int = 0
    """64-bit, unsigned."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the output with reason `stop`. Includes the model's EOS ids unless
    `ignore_eos` is set.
    """
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: no logprobs; 0: of the sampled token only; n: also of the n most likely tokens."""
    num_prompt_logprobs: int | None = None
    bad_words: list[list[int]] = []
    """Token sequences that never appear: after all but the last token of one, the last is masked.
    """
    grammar: Grammar | None = None
    """None: any text is allowed."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
