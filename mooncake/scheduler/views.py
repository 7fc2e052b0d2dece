"""What is known of each worker: its hello, its last report, and what was given to it since.

A report is always a little old. So a view keeps its own book of assignments: those the last report
cannot know of yet are added to it, those it still counts but that have ended are taken off.
Owned by the Conductor. Facts only; no choices here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake.base import BlockKey, Role, WorkerHello, WorkerLoad, WorkerRef
from mooncake.scheduler.cost import StepCostModel

REPORT_LAG_S = 0.05
"""A report speaks of tasks sent at least this long before it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One request's share of a worker."""

    request_id: str
    placed_s: float
    num_prefill_tokens: int = 0
    """Tokens the worker has to compute before the first token."""
    prefill_s: float = 0.0
    """Predicted time of that."""
    num_context_tokens: int = 0
    """Tokens whose KV it will hold while decoding; 0 on a prefill worker."""
    num_blocks: int = 0
    keys: tuple[BlockKey, ...] = ()
    """Blocks that will be in this worker's cache when the prefill is done."""


@dataclass(slots=True)
class _Since:
    """What has ended since the last report although the report counts it."""

    num_prefill_tokens: int = 0
    num_sequences: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class InstanceView:
    """One live worker as the Conductor sees it."""

    hello: WorkerHello
    load: WorkerLoad
    cost: StepCostModel
    draining: bool = False
    pending: dict[str, Assignment] = field(default_factory=dict)
    """Assigned, and not in the last report."""
    reported: dict[str, Assignment] = field(default_factory=dict)
    """Assigned, and in the last report."""
    _ended: _Since = field(default_factory=_Since)
    _prefilled: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, hello: WorkerHello) -> InstanceView:
        """Return the view of a worker that has just said hello: empty."""
        load = WorkerLoad(num_free_blocks=hello.num_blocks, num_total_blocks=hello.num_blocks)
        return cls(hello=hello, load=load, cost=StepCostModel(hello.profile))

    @property
    def worker(self) -> WorkerRef:
        return self.hello.worker

    @property
    def worker_id(self) -> str:
        return self.hello.worker.worker_id

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def num_assigned(self) -> int:
        return len(self.pending) + len(self.reported)

    def assigned(self, request_id: str) -> Assignment | None:
        """Return what this request was given here, if anything."""
        return self.pending.get(request_id) or self.reported.get(request_id)

    def observe(self, load: WorkerLoad, now: float) -> None:
        """Take in a report that has just arrived."""
        self.load = load
        self._ended = _Since()
        visible = [a for a in self.pending.values() if a.placed_s <= now - REPORT_LAG_S]
        for assignment in visible:
            del self.pending[assignment.request_id]
            self.reported[assignment.request_id] = assignment

    def assign(self, assignment: Assignment) -> None:
        """Book one request's share."""
        assert self.assigned(assignment.request_id) is None, "assigned twice"
        self.pending[assignment.request_id] = assignment

    def prefilled(self, request_id: str) -> None:
        """The request has its first token: nothing of its prompt is left to compute here."""
        assignment = self.assigned(request_id)
        if assignment is None or request_id in self._prefilled:
            return
        self._prefilled.add(request_id)
        if request_id in self.reported:
            self._ended.num_prefill_tokens += assignment.num_prefill_tokens

    def release(self, request_id: str) -> Assignment | None:
        """The request is over here; returns what it had."""
        self.prefilled(request_id)
        self._prefilled.discard(request_id)
        assignment = self.reported.pop(request_id, None)
        if assignment is None:
            return self.pending.pop(request_id, None)
        if assignment.num_context_tokens:
            self._ended.num_sequences += 1
        self._ended.num_context_tokens += assignment.num_context_tokens
        self._ended.num_blocks += assignment.num_blocks
        return assignment

    def queued_s(self) -> float:
        """Return the predicted seconds until everything queued here is computed.

        Own assignments count with the time predicted for each, scaled by what the report says is
        left of them; tokens from elsewhere (another gateway) at the model's rate.
        """
        seconds, _ = self._outstanding(self.pending)
        reported_s, reported_tokens = self._outstanding(self.reported)
        left = max(0, self.load.num_queued_tokens - self._ended.num_prefill_tokens)
        if reported_tokens and left <= reported_tokens:
            return seconds + reported_s * left / reported_tokens
        foreign = left - reported_tokens
        if foreign > 0:
            seconds += self.cost.prefill_s(foreign, 0, self.hello.max_batched_tokens)
        return seconds + reported_s

    def num_queued_tokens(self) -> int:
        """Return the prompt tokens given to this worker and not yet computed."""
        left = max(0, self.load.num_queued_tokens - self._ended.num_prefill_tokens)
        return left + sum(
            a.num_prefill_tokens
            for a in self.pending.values()
            if a.request_id not in self._prefilled
        )

    def num_sequences(self) -> int:
        """Return the sequences that decode here, or soon will."""
        known = self.load.num_running + self.load.num_waiting - self._ended.num_sequences
        return max(max(known, 0) + len(self.pending), self.num_assigned)

    def num_context_tokens(self) -> int:
        """Return the tokens in the KV of sequences that decode here, or soon will."""
        pending = sum(a.num_context_tokens for a in self.pending.values())
        own = pending + sum(a.num_context_tokens for a in self.reported.values())
        known = max(0, self.load.num_context_tokens - self._ended.num_context_tokens)
        return max(known + pending, own)

    def num_free_blocks(self) -> int:
        """Return the blocks not promised to anyone (may be negative: more was promised)."""
        pending = sum(a.num_blocks for a in self.pending.values())
        freed = self.load.num_free_blocks + self._ended.num_blocks
        return min(freed, self.load.num_total_blocks or self.hello.num_blocks) - pending

    def _outstanding(self, assignments: dict[str, Assignment]) -> tuple[float, int]:
        seconds, tokens = 0.0, 0
        for assignment in assignments.values():
            if assignment.request_id not in self._prefilled:
                seconds += assignment.prefill_s
                tokens += assignment.num_prefill_tokens
        return seconds, tokens
