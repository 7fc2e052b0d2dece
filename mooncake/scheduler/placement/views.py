"""What is known about each worker: its hello, its last report, and what was assigned to it since.

A report is always a little old. So a view keeps its own list of assignments: those that the last
report cannot include yet are added to it, and those that it still counts but that have ended are
subtracted. Owned by the Conductor. Facts only; no choices here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.base import BlockKey, Role, WorkerHello, WorkerLoad, WorkerRef
from mooncake.engine.cost import StepCostModel

REPORT_LAG_S = 0.05
"""A report includes the tasks that were sent at least this long before it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One request's share of a worker."""

    request_id: str
    placed_s: float
    num_prefill_tokens: int = 0
    """Tokens that the worker has to compute before the first token."""
    prefill_s: float = 0.0
    """The predicted seconds for that."""
    num_context_tokens: int = 0
    """Tokens whose KV it will hold while decoding; 0 on a prefill worker."""
    num_blocks: int = 0
    keys: tuple[BlockKey, ...] = ()
    """Blocks that will be in this worker's cache when the prefill is done."""


@dataclass(slots=True)
class _EndedSince:
    """Work that has ended since the last report but is still counted in it."""

    num_prefill_tokens: int = 0
    num_sequences: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class _Assignments:
    """Assignments with their sums, updated one by one: a busy decode worker has hundreds."""

    shares: dict[str, Assignment]
    to_compute: dict[str, Assignment] = field(default_factory=dict)
    """Assignments with a prompt that is not computed yet."""
    num_context_tokens: int = 0
    num_blocks: int = 0
    _outstanding: tuple[float, int] | None = None
    """What `outstanding` returned since the last change."""

    def add(self, share: Assignment, *, prefilled: bool) -> None:
        self.shares[share.request_id] = share
        self.num_context_tokens += share.num_context_tokens
        self.num_blocks += share.num_blocks
        if share.num_prefill_tokens and not prefilled:
            self.to_compute[share.request_id] = share
            self._outstanding = None

    def remove(self, request_id: str) -> Assignment | None:
        share = self.shares.pop(request_id, None)
        if share is not None:
            self.num_context_tokens -= share.num_context_tokens
            self.num_blocks -= share.num_blocks
            self.computed(request_id)
        return share

    def computed(self, request_id: str) -> None:
        """Record that a request's prompt is computed, or not wanted any more."""
        if self.to_compute.pop(request_id, None) is not None:
            self._outstanding = None

    def outstanding(self) -> tuple[float, int]:
        """Return the predicted seconds and the tokens still to compute. The seconds are summed
        after each change, because a running sum of floats would drift.
        """
        if self._outstanding is None:
            seconds, tokens = 0.0, 0
            for share in self.to_compute.values():
                seconds += share.prefill_s
                tokens += share.num_prefill_tokens
            self._outstanding = seconds, tokens
        return self._outstanding


def _ignore(_worker_id: str) -> None:
    """Do nothing."""


@dataclass(slots=True)
class InstanceView:
    """One live worker as the Conductor sees it."""

    hello: WorkerHello
    load: WorkerLoad
    cost: StepCostModel
    on_change: Callable[[str], None] = _ignore
    """Called with the worker's id when anything here has changed."""
    _draining: bool = False
    _pending: _Assignments = field(default_factory=lambda: _Assignments({}))
    """Assigned, but not in the last report."""
    _reported: _Assignments = field(default_factory=lambda: _Assignments({}))
    """Assigned, and in the last report."""
    _ended: _EndedSince = field(default_factory=_EndedSince)
    _prefilled: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, hello: WorkerHello) -> InstanceView:
        """Return the empty view of a worker that has just joined."""
        load = WorkerLoad(num_free_blocks=hello.num_blocks, num_total_blocks=hello.num_blocks)
        return cls(hello=hello, load=load, cost=StepCostModel(hello.profile, hello.num_stages))

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
    def draining(self) -> bool:
        """True if the worker wants to leave, and gets only work that no other can do."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        self.on_change(self.worker_id)

    @property
    def num_assigned(self) -> int:
        return len(self._pending.shares) + len(self._reported.shares)

    @property
    def assigned_ids(self) -> tuple[str, ...]:
        """The ids of the requests that have a share here."""
        return (*self._pending.shares, *self._reported.shares)

    def assigned(self, request_id: str) -> Assignment | None:
        """Return the share that this request has here, or None."""
        return self._pending.shares.get(request_id) or self._reported.shares.get(request_id)

    def observe(self, load: WorkerLoad, now: float) -> None:
        """Take a report that has just arrived."""
        self.load = load
        self._ended = _EndedSince()
        visible = [a for a in self._pending.shares.values() if a.placed_s <= now - REPORT_LAG_S]
        for assignment in visible:
            self._pending.remove(assignment.request_id)
            prefilled = assignment.request_id in self._prefilled
            self._reported.add(assignment, prefilled=prefilled)
        self.on_change(self.worker_id)

    def assign(self, assignment: Assignment) -> None:
        """Add one request's share."""
        assert self.assigned(assignment.request_id) is None, "assigned twice"
        self._pending.add(assignment, prefilled=False)
        self.on_change(self.worker_id)

    def prefilled(self, request_id: str) -> None:
        """Record the first token of a request: nothing of its prompt is left to compute here."""
        assignment = self.assigned(request_id)
        if assignment is None or request_id in self._prefilled:
            return
        self._prefilled.add(request_id)
        self._pending.computed(request_id)
        if request_id in self._reported.shares:
            self._reported.computed(request_id)
            self._ended.num_prefill_tokens += assignment.num_prefill_tokens
        self.on_change(self.worker_id)

    def release(self, request_id: str) -> Assignment | None:
        """Remove a request that has ended here; return its share."""
        self.prefilled(request_id)
        self._prefilled.discard(request_id)
        self.on_change(self.worker_id)
        assignment = self._reported.remove(request_id)
        if assignment is None:
            return self._pending.remove(request_id)
        if assignment.num_context_tokens:
            self._ended.num_sequences += 1
        self._ended.num_context_tokens += assignment.num_context_tokens
        self._ended.num_blocks += assignment.num_blocks
        return assignment

    def queued_s(self) -> float:
        """Return the predicted seconds until all prompts queued here are computed.

        Own assignments count with the time predicted for each, scaled by the part that the report
        says is left; tokens from elsewhere (another gateway) count at the model's rate.
        """
        seconds, _ = self._pending.outstanding()
        reported_s, reported_tokens = self._reported.outstanding()
        left = max(0, self.load.num_queued_tokens - self._ended.num_prefill_tokens)
        if reported_tokens and left <= reported_tokens:
            return seconds + reported_s * left / reported_tokens
        foreign = left - reported_tokens
        if foreign > 0:
            seconds += self.cost.prefill_s(foreign, 0, self.hello.max_batched_tokens)
        return seconds + reported_s

    def num_queued_tokens(self) -> int:
        """Return the prompt tokens assigned to this worker and not yet computed."""
        left = max(0, self.load.num_queued_tokens - self._ended.num_prefill_tokens)
        return left + self._pending.outstanding()[1]

    def num_sequences(self) -> int:
        """Return the number of sequences that decode here, or soon will."""
        known = self.load.num_running + self.load.num_waiting - self._ended.num_sequences
        return max(max(known, 0) + len(self._pending.shares), self.num_assigned)

    def num_context_tokens(self) -> int:
        """Return the tokens in the KV of sequences that decode here, or soon will."""
        pending = self._pending.num_context_tokens
        own = pending + self._reported.num_context_tokens
        known = max(0, self.load.num_context_tokens - self._ended.num_context_tokens)
        return max(known + pending, own)

    def num_free_blocks(self) -> int:
        """Return the blocks not promised to a request (negative when more were promised)."""
        freed = self.load.num_free_blocks + self._ended.num_blocks
        limit = self.load.num_total_blocks or self.hello.num_blocks
        return min(freed, limit) - self._pending.num_blocks
