"""What one step computes (`StepPlan`) and what comes out (`StepResult`): plain values, no tensors,
no back-pointers.

Facts are sent once: a sequence's sampling settings and history travel in its `SequenceStart`,
later steps name it by `sequence_id` and send only what is new. So the same values drive one runner
in this process or many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake.base.request import TokenLogprobs
from mooncake.base.sampling import SamplingParams


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence the runner has not seen, or was told to forget."""

    sequence_id: int
    sampling: SamplingParams
    prompt_tokens: Sequence[int]
    output_tokens: list[int]
    """Sampled before (elsewhere, or before a preemption): penalties count them, seeds go on after
    them.
    """


class StepSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one sequence in a step: compute `tokens` at positions `start…`, maybe sample
    after the last.
    """

    sequence_id: int
    start: int
    """Tokens whose KV lies in the pages already."""
    tokens: list[int]
    pages: list[int]
    """The whole page table of the sequence, covering start + len(tokens) tokens."""
    sample: bool
    """Sample the token after the last one."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass."""

    step_id: int
    starts: list[SequenceStart]
    slots: list[StepSlot]
    ended: list[int]
    """Sequences the runner may forget. None of them is in `starts` or `slots`."""
    report_layers: bool = False
    """Emit `LayerDone` as the KV of each layer is written."""

    @property
    def num_tokens(self) -> int:
        return sum(len(slot.tokens) for slot in self.slots)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    sequence_id: int
    token: int
    logprobs: TokenLogprobs | None = None


class LayerDone(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of `layer` for all tokens of the step lies in its pages: it may be pushed."""

    step_id: int
    layer: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a step: an event for the engine."""

    step_id: int
    samples: list[Sample]
    seconds: float
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """sequence_id -> for each token of the slot, of the *next* prompt token (where asked for and
    known).
    """
    failures: dict[int, str] = {}
    """sequence_id -> why this one alone cannot go on, whoever tries; it has no sample."""
    error: str | None = None
    """The step failed as a whole; nothing it wrote can be trusted."""


RunnerEvent = LayerDone | StepResult
