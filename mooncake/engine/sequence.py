"""One sequence in an engine: its known tokens, computed tokens and pages. And the order of
sequences, which only this module defines: which is served first, and which yields. Pure.

There is no difference between prefill and decode here. Known tokens are computed until all are.
Then a new token is sampled after the last one and becomes known. A sequence is owned by the
`Engine` to which it was added.

Sequences are ordered by turn, which the gateway assigns by class and tenant, then by class, then by
arrival. Turns order the waiting sequences. Running sequences hold seats and pages for long, so each
flow (a tenant in a class) is also due a share of both, by the weight of its class. Where flows
compete, one below its share goes first, and takes what others hold above theirs (`Standing`).
Otherwise the waiting queue is served from its front, and pages are taken back from its rear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from mooncake.base.blocks import BlockKey, chain_root, extend_chain
from mooncake.base.request import (
    Failure,
    Flow,
    GenerateRequest,
    RequestOutput,
    TokenLogprobs,
    fair_shares,
)
from mooncake.engine.config import EngineConfig
from mooncake.engine.prompt_time import Allowance


class SequenceState(str, Enum):
    """Where a sequence is in its life."""

    NEW = "new"
    """Not added yet; the caller owns it."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Drafting:
    """What is known for drafting the next tokens (`speculation`). Empty for a sequence without
    drafts.
    """

    text: str = ""
    """The sequence's last tokens, one letter for each."""
    num_read: int = 0
    """How many tokens `text` was made from."""
    num_tested: float = 0.0
    """Drafts that were compared with sampled tokens. Old ones count less."""
    num_accepted: float = 0.0

    def learn(self, num_tested: int, num_accepted: int, keep: float) -> None:
        """Count further drafts. What was known before counts only with the share `keep` from now
        on.
        """
        if num_tested:
            self.num_tested = keep * self.num_tested + num_tested
            self.num_accepted = keep * self.num_accepted + num_accepted


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence is mutable. The caller may set the first group of fields before `Engine.add`;
    afterwards only the engine writes. Roles add what they know of its request in a subclass
    (`instance.job_table.Job`), so that a request has one object on a worker.

    To hand over KV that exists already (fetched, or pushed by another worker), the caller sets
    `pages`, with one reference each for the sequence, `num_computed` and `num_cached_tokens`. A
    sequence prefilled elsewhere comes with its first output token in `output_tokens` and
    `num_computed = len(prompt_tokens)`.
    """

    sequence_id: int
    """The id by which the runner knows the sequence. An engine never uses it twice."""
    request: GenerateRequest
    prompt_tokens: memoryview[int] = field(init=False)
    attempt: int = 0
    turn: float = 0.0
    """The sequence's place in the order: smaller goes first."""
    flow: Flow = field(init=False)
    output_tokens: list[int] = field(default_factory=list)
    max_new_tokens: int = 0
    """The engine ends the sequence at this many output tokens, including those it came with. 0
    means the request's `max_tokens`. A prefill worker sets `len(output_tokens) + 1`.
    """
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """How many leading tokens have their KV in `pages`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused when the sequence was first admitted."""
    report_layers: bool = False
    """Whether steps with this sequence report each layer (`LayerDone`)."""

    drafting: Drafting = field(default_factory=Drafting)
    allowance: Allowance = field(default_factory=Allowance)
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of all full blocks of known tokens; `extend_keys` updates them."""
    state: SequenceState = SequenceState.NEW
    arrival: int = -1
    added_s: float = 0.0
    waits_since_s: float = 0.0
    """When it was added, or preempted last."""
    started_s: float | None = None
    """When the sequence's first step was submitted."""
    steps: list[int] = field(default_factory=list)
    """The steps in flight that compute this sequence and use its pages, in order. All but the last
    compute chunks after which nothing is sampled.
    """
    num_in_flight: int = 0
    """How many known tokens these steps compute."""
    failure: Failure | None = None
    """The failure with which the sequence ends as soon as no step computes it any more."""
    aborted: bool = False
    known_to_runner: bool = False
    last_turn: int = 0
    """When it last got a seat or a share of a step, as a running count of these events."""
    num_published: int = 0
    """How many leading blocks were published in the prefix cache."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """The entries collected so far, if the request asks for them. None: not wanted, or
    delivered.
    """

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
        """The number of known tokens: prompt and output so far."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def num_missing(self) -> int:
        """How many known tokens to compute before the next one can be sampled; at least 1."""
        return self.num_tokens - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """How many of these no step in flight computes. If it is 0, the last step samples."""
        return self.num_missing - self.num_in_flight

    @property
    def num_final_computed(self) -> int:
        """How many tokens this engine computes unless the sequence ends early."""
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
            self.prompt_logprobs = [None]  # the entries are computed again from the first token
        return pages


Made = tuple[Sequence, RequestOutput]
"""What a step made of a sequence: its new tokens, already appended to `output_tokens`, its end, or
both. The pages of a sequence that has ended stay held until `Engine.release`. LENGTH may mean only
that this engine's own `max_new_tokens` is reached: `request_finish` tells whether the request is
complete.
"""


def rank(sequence: Sequence) -> tuple[float, int, int]:
    """Return the sort key: smaller goes first. It is unique among the sequences of an engine."""
    return sequence.turn, sequence.flow[0].order, sequence.arrival


def last_in_order(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the sequence that yields first: the last in turn."""
    return max(sequences, key=rank, default=None)


class Standing:
    """How many seats of the batch and pages each flow holds, and how many it is due. A page that
    several sequences share counts for each of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        sequences: Iterable[Sequence],
        flow: Flow | None = None,
        outside: Mapping[Flow, int] = MappingProxyType({}),
    ) -> None:
        """sequences: those that run or wait. flow: a flow that wants a share too. outside: pages
        that flows hold for anything else.
        """
        self._seats: Counter[Flow] = Counter()
        self._pages: Counter[Flow] = Counter(outside)
        self._config = config
        for sequence in sequences:
            self._count(sequence)
        self._shares = fair_shares([*self._pages, *([] if flow is None else [flow])])

    def _count(self, sequence: Sequence, sign: int = 1) -> None:
        self._seats[sequence.flow] += sign * (sequence.state is SequenceState.RUNNING)
        self._pages[sequence.flow] += sign * len(sequence.pages)

    def is_within(self, flow: Flow, num_seats: int = 0, num_pages: int = 0) -> bool:
        """Return whether a flow holds no more than its share after it gets this many more. One seat
        is always within its share.
        """
        share = self._shares[flow]
        most_seats = max(1, int(share * self._config.max_num_seqs))
        return (
            self._seats[flow] + num_seats <= most_seats
            and self._pages[flow] + num_pages <= share * self._config.num_blocks
        )

    def others_above(self, flow: Flow) -> bool:
        """Return whether another flow than `flow` holds more than its share."""
        return any(other != flow and not self.is_within(other) for other in self._shares)

    def give_back(self, flow: Flow, num_pages: int) -> None:
        """Subtract `num_pages` pages from a flow's count."""
        self._pages[flow] -= num_pages

    def above(self, holders: Iterable[Sequence], flow: Flow) -> list[Sequence]:
        """Return the `holders` that other flows than `flow` have above their shares, the last in
        order first. The first sequence of each flow is never among them, so even one that is larger
        than its flow's share can finish.
        """
        ordered = sorted(holders, key=rank)
        firsts = {sequence.flow: sequence for sequence in reversed(ordered)}
        found: list[Sequence] = []
        for sequence in reversed(ordered):
            is_other = sequence.flow != flow and sequence is not firsts[sequence.flow]
            if is_other and not self.is_within(sequence.flow):
                found.append(sequence)
                self._count(sequence, -1)
        for sequence in found:
            self._count(sequence)
        return found
