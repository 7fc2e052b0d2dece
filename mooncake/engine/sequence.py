"""One sequence in an engine: tokens known, tokens computed, pages. Owned by the `Engine` it was
added to.

There is no prefill and no decode here. A sequence whose known tokens are all computed but the last
few gets them computed; after the last known token one more is sampled and so becomes known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mooncake.base.blocks import BlockKey, chain_root, extend_chain
from mooncake.base.request import Failure, FinishReason, GenerateRequest, TokenLogprobs


class SequenceState(str, Enum):
    NEW = "new"
    """Not added yet: belongs to the caller."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable. Before `Engine.add` the caller may fill in the first group of fields; afterwards
    only the engine writes.

    KV that is there already (fetched, or pushed by another worker) is handed over by setting
    `pages`, each held once for the sequence, and `num_computed`; `num_cached_tokens` is then the
    caller's to set as well. A sequence prefilled elsewhere comes with its first output token in
    `output_tokens` and `num_computed = len(prompt_tokens)`.
    """

    sequence_id: int
    """Unique in its engine for all time; the runner knows the sequence by it."""
    request: GenerateRequest
    prompt_tokens: memoryview[int] = field(init=False)
    attempt: int = 0
    turn: float = 0.0
    """Its place among those of its class: smaller goes first."""
    output_tokens: list[int] = field(default_factory=list)
    max_new_tokens: int = 0
    """This engine is done at that many output tokens, those it came with included; 0 stands for
    the request's `max_tokens`. A prefill worker sets `len(output_tokens) + 1`.
    """
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """The first tokens, whose KV lies in `pages`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused rather than computed, at first admission."""
    report_layers: bool = False
    """Steps with this sequence report each layer (`LayerDone`)."""

    keys: list[BlockKey] = field(default_factory=list)
    """Of all full blocks of known tokens; grows with them (`extend_keys`)."""
    state: SequenceState = SequenceState.NEW
    arrival: int = -1
    added_s: float = 0.0
    started_s: float | None = None
    """When its first step was submitted."""
    step_id: int | None = None
    """The step in flight that computes this sequence; its pages are in use until the step ends."""
    aborted: bool = False
    known_to_runner: bool = False
    num_published: int = 0
    """Leading blocks that the prefix cache has been told about."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Collected so far, where the request asks for them; None = not wanted or delivered."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.prompt_tokens
        if self.max_new_tokens == 0:
            self.max_new_tokens = self.request.sampling.max_tokens
        wanted = self.request.sampling.num_prompt_logprobs is not None
        if wanted and not self.output_tokens:
            self.prompt_logprobs = [None]

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def num_missing(self) -> int:
        """Known tokens that are to be computed before the next one can be sampled; at least 1."""
        return self.num_tokens - self.num_computed

    @property
    def num_final_computed(self) -> int:
        """Tokens computed in this engine if nothing ends the sequence early (the last token
        sampled is not).
        """
        return len(self.prompt_tokens) + self.max_new_tokens - 1

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Return the known tokens at positions [start, stop)."""
        prompt = self.prompt_tokens
        cut = len(prompt)
        if start >= cut:
            return self.output_tokens[start - cut : stop - cut]
        return prompt[start:stop].tolist() + self.output_tokens[: max(0, stop - cut)]

    def extend_keys(self, layout_fingerprint: str, block_tokens: int) -> list[BlockKey]:
        """Bring `keys` up to date with the known tokens and return it."""
        start = len(self.keys) * block_tokens
        if self.num_tokens - start >= block_tokens:
            request = self.request
            parent = (
                self.keys[-1]
                if self.keys
                else chain_root(layout_fingerprint, request.tenant, request.cache_salt)
            )
            tokens = self.tokens_between(start, self.num_tokens)
            self.keys.extend(extend_chain(parent, tokens, block_tokens))
        return self.keys

    def drop_kv(self) -> list[int]:
        """Forget all computed tokens and return the pages they were in, which the caller
        releases.
        """
        pages, self.pages = self.pages, []
        self.num_computed = 0
        self.num_published = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # they are computed again from the first token
        return pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What became of a sequence: a token, or its end, or both."""

    sequence: Sequence
    token: int | None = None
    """Already appended to `sequence.output_tokens`."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token, where asked for: one entry a prompt token, None for the first."""
    finish: FinishReason | None = None
    """Set = the sequence ended here; its pages stay held until `Engine.release`. LENGTH also when
    this engine's own `max_new_tokens` is reached: `request_finish` tells whether the request is
    over.
    """
    stop_token_id: int | None = None
    failure: Failure | None = None
    """Set exactly when `finish` is ERROR."""


def request_finish(
    request: GenerateRequest, output_tokens: list[int], max_model_len: int
) -> tuple[FinishReason | None, int | None]:
    """Return (reason, stop token) when the newest of `output_tokens` ends the request, else Nones.

    A stop token ends it only after `min_tokens` tokens before it, as the sampler's mask has it.
    """
    sampling = request.sampling
    num_outputs = len(output_tokens)
    if (
        num_outputs > sampling.min_tokens
        and output_tokens
        and output_tokens[-1] in sampling.stop_token_ids
    ):
        return FinishReason.STOP, output_tokens[-1]
    num_tokens = len(request.prompt_tokens) + num_outputs
    if num_outputs >= sampling.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None, None
