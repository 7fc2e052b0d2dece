"""One sequence in an engine: its known tokens, computed tokens and pages. Owned by the `Engine` it
was added to.

There is no prefill and no decode here. Known tokens are computed until all are; after the last one
a new token is sampled, which becomes known.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from mooncake.base.blocks import BlockKey, chain_root, extend_chain
from mooncake.base.request import Failure, FinishReason, Flow, GenerateRequest, TokenLogprobs


class SequenceState(str, Enum):
    """Where a sequence is in its life."""

    NEW = "new"
    """Not added yet: owned by the caller."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Drafting:
    """What is known for drafting the next tokens (`speculation`); for a sequence that gets none,
    nothing.
    """

    text: str = ""
    """Its last tokens, a letter each."""
    num_read: int = 0
    """Tokens that `text` was made of."""
    num_tested: float = 0.0
    """Drafts that were compared with sampled tokens, old ones counting less."""
    num_accepted: float = 0.0

    def learn(self, num_tested: int, num_accepted: int, keep: float) -> None:
        """Count further drafts; of what was known before, only the share `keep` counts from now."""
        if num_tested:
            self.num_tested = keep * self.num_tested + num_tested
            self.num_accepted = keep * self.num_accepted + num_accepted


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable. The caller may set the first group of fields before `Engine.add`; afterwards only
    the engine writes.

    KV that exists already (fetched, or pushed by another worker) is handed over by setting `pages`,
    with one reference each for the sequence, and `num_computed`; the caller then sets
    `num_cached_tokens` as well. A sequence prefilled elsewhere comes with its first output token in
    `output_tokens` and `num_computed = len(prompt_tokens)`.
    """

    sequence_id: int
    """Never reused in its engine; the runner knows the sequence by it."""
    request: GenerateRequest
    prompt_tokens: memoryview[int] = field(init=False)
    attempt: int = 0
    turn: float = 0.0
    """Its place in the order: smaller goes first."""
    flow: Flow = field(init=False)
    output_tokens: list[int] = field(default_factory=list)
    max_new_tokens: int = 0
    """The engine ends the sequence at this many output tokens, including those it came with; 0
    stands for the request's `max_tokens`. A prefill worker sets `len(output_tokens) + 1`.
    """
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose KV lies in `pages`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused instead of computed, at first admission."""
    report_layers: bool = False
    """Steps with this sequence report each layer (`LayerDone`)."""

    drafting: Drafting = field(default_factory=Drafting)
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of all full blocks of known tokens; `extend_keys` updates them."""
    state: SequenceState = SequenceState.NEW
    arrival: int = -1
    added_s: float = 0.0
    started_s: float | None = None
    """When its first step was submitted."""
    steps: list[int] = field(default_factory=list)
    """The steps in flight that compute this sequence and use its pages, in order. All but the last
    are chunks behind which nothing is sampled.
    """
    num_in_flight: int = 0
    """Known tokens that they compute."""
    failure: Failure | None = None
    """Why it fails as soon as no step computes it any more."""
    aborted: bool = False
    known_to_runner: bool = False
    last_turn: int = 0
    """When it got its seat, or a share of a step: a count of these."""
    num_published: int = 0
    """Leading blocks that were published in the prefix cache."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Collected so far, if the request asks for them; None = not wanted, or delivered."""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.request.prompt_tokens
        self.flow = self.request.flow
        if self.max_new_tokens == 0:
            self.max_new_tokens = self.request.sampling.max_tokens
        wanted = self.request.sampling.num_prompt_logprobs is not None
        if wanted and not self.output_tokens:
            self.prompt_logprobs = [None]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def num_missing(self) -> int:
        """Known tokens to compute before the next one can be sampled; at least 1."""
        return self.num_tokens - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Of these, tokens that no step in flight computes; 0: the last one samples."""
        return self.num_missing - self.num_in_flight

    @property
    def num_final_computed(self) -> int:
        """Tokens computed in this engine unless the sequence ends early."""
        return len(self.prompt_tokens) + self.max_new_tokens - 1

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Return the known tokens at positions [start, stop)."""
        prompt = self.prompt_tokens
        cut = len(prompt)
        if start >= cut:
            return self.output_tokens[start - cut : stop - cut]
        return prompt[start:stop].tolist() + self.output_tokens[: max(0, stop - cut)]

    def extend_keys(self, layout_fingerprint: str, block_tokens: int) -> list[BlockKey]:
        """Extend `keys` to all known tokens and return them."""
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
        """Set all tokens to not computed, and return the pages, which the caller releases."""
        pages, self.pages = self.pages, []
        self.num_computed = 0
        self.num_published = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # they are computed again from the first token
        return pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """A step's result for one sequence: tokens, its end, or both."""

    sequence: Sequence
    tokens: Seq[int] = ()
    """Already appended to `sequence.output_tokens`; several where drafts were accepted."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token, if requested: one entry per prompt token, None for the first."""
    finish: FinishReason | None = None
    """Set when the sequence has ended here; its pages stay held until `Engine.release`. Also LENGTH
    when this engine's own `max_new_tokens` is reached: `request_finish` tells whether the request
    is complete.
    """
    stop_token_id: int | None = None
    failure: Failure | None = None
    """Set exactly when `finish` is ERROR."""
