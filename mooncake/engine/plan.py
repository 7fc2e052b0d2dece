"""The plan of one step (`StepPlan`), its result (`StepResult`) and the ports of what runs it: plain
values, no tensors.

A plan says once what is not new in every step: it brings the sequence itself, of which the runner
reads the request and the output so far. Later steps name it by `sequence_id` and bring only new
tokens. So the same values drive one runner in this process or many ranks.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from mooncake.base.mailbox import Polled
from mooncake.base.request import Failure, Grammar, TokenLogprobs
from mooncake.engine.ranks.kv_moves import OfRank
from mooncake.engine.sequence import Sequence

BY_MODEL = -1
"""Stands for a draft that the runner makes itself from the states that it holds."""


class StepSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one sequence in a step: compute `tokens` from position `start` on, and sample
    after the last one if `sample` is set.

    The last `num_drafts` of `tokens` are guesses (`speculation`), or each is `BY_MODEL`. Sampling
    begins after the token before them, and goes on after each guess that equals the sampled token.
    """

    sequence_id: int
    start: int
    """The number of tokens whose KV is already in the pages."""
    tokens: list[int]
    pages: list[int]
    """The whole page table of the sequence, covering start + len(tokens) tokens. It only grows from
    step to step, until the sequence starts anew.
    """
    sample: bool
    """Sample the token after the last one."""
    num_drafts: int = 0
    """Above 0 only with `sample`, and only when no log-probabilities of the prompt are wanted."""

    @property
    def drafts(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.num_drafts :]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass."""

    step_id: int
    starts: list[Sequence]
    """Sequences that are new to the runner, or that it was told to forget. Penalties and seeds
    count the output that they come with. The engine appends no token to it before the end of a step
    that samples one, so a runner on a thread of its own may read it when it begins this step.
    """
    slots: list[StepSlot]
    ended: list[int]
    """Sequences that the runner may forget, before anything else in this step. A sequence that was
    preempted and is back is also in `starts`, because its pages are different.
    """
    report_layers: bool = False
    """Whether to emit `LayerDone` when the KV of each layer is written."""

    @property
    def num_tokens(self) -> int:
        return sum(len(slot.tokens) for slot in self.slots)


class LayerDone(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of `layer`, and of all layers before it, is in the pages for all tokens of the step,
    so it can be pushed. The event of a later step may come before that of an earlier step: its
    first layers are computed while the earlier step's last layers are.
    """

    step_id: int
    layer: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a step, as an event for the engine."""

    step_id: int
    seconds: float
    tokens: dict[int, list[int]] = {}
    """sequence_id -> the token that its slot sampled, and one more for each accepted draft."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """sequence_id -> one entry for each of its tokens, where requested."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """sequence_id -> logprobs of the *next* prompt token, for each token of the slot (where
    requested and known).
    """
    failures: dict[int, Failure] = {}
    """sequence_id -> why only this sequence failed; it has no tokens."""
    error: str | None = None
    """Why the whole step failed. Then nothing that it wrote is valid."""
    counters: dict[str, float] = {}
    """The runner's counts since its start, by name, for `WorkerLoad.counters`."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a runner that shares experts with others, including steps that only the others
    asked for.
    """

    counters: dict[str, float]
    """The counts of the same name in `StepResult`."""
    expert_rows: list[int] | None = None
    """The rows for `WorkerLoad.expert_rows`; None: they have not changed."""


RunnerEvent = LayerDone | StepResult | Counted | OfRank


class Runner(Protocol):
    """Runs steps in order on the model. The driver passes its events to the role's `handle`."""

    def prepare(self, grammar: Grammar) -> None:
        """Start compiling a grammar that a sequence will need soon; never blocks."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step; never blocks. Exactly one `StepResult` follows, after any `LayerDone`s."""


class PolledRunner(Runner, Polled[RunnerEvent], Protocol):
    """A runner that a driver's loop polls."""
