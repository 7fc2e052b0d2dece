"""What is known about each worker: its hello, its last report, and what was assigned to it since.

A report is always a little old. So a view keeps its own list of assignments: those that the last
report cannot include yet are added to it, and those that it still counts but that have ended are
subtracted. A fleet has the views of one role, also as columns of numbers, so that a thousand
workers are compared at once: a row is computed again when its view has changed, and choices made
from columns equal those made from views one by one. Owned by the Conductor. Facts only; no choices
here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mooncake.base import CostSample, Role, WorkerHello, WorkerLoad, WorkerRef
from mooncake.engine.cost import StepCostModel
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch

REPORT_LAG_S = 0.05
"""A report includes the tasks that were sent at least this long before it came."""
REST_S = 10.0
"""A worker that had nothing to do for so long is no longer taken to be as slow as its latest steps
were. Otherwise one that looks too slow for every request would never be tried again.
"""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NO_SLOT = -1
MANY_SLOTS = -2
"""Stands for a node with several pools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One request's share of a worker."""

    request_id: str
    placed_s: float
    num_prefill_tokens: int = 0
    """Tokens that the worker has to compute before the first token."""
    num_reused_tokens: int = 0
    """Tokens before these, which are cached or fetched."""
    prefill_s: float = 0.0
    """The predicted seconds for that."""
    num_context_tokens: int = 0
    """Tokens whose KV it will hold while decoding; 0 on a prefill worker."""
    num_blocks: int = 0


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
    _first_s: dict[str, float] = field(default_factory=dict)
    """Request id -> when its first token came, where that is known."""
    step_began_s: float = math.inf
    """When prompts here last began to be computed, or were last seen to get on. Infinite before the
    first.
    """
    _reported_s: float = -math.inf
    """When the last report came."""
    _busy_s: float = -math.inf
    """When it last had something to do."""

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

    def observe(self, load: WorkerLoad, now: float, samples: Sequence[CostSample] = ()) -> None:
        """Take a report that has just arrived, and the steps measured since the last one."""
        if load.num_queued_tokens < self.load.num_queued_tokens:
            # It ended a step since the last report, or about in the middle.
            began_s = now if math.isinf(self._reported_s) else (self._reported_s + now) / 2
            known = self.step_began_s
            self.step_began_s = began_s if math.isinf(known) else max(known, began_s)
        self.load, self._reported_s = load, now
        self.cost.observe(samples)
        if samples or load.num_running or load.num_waiting or self.num_assigned:
            self._busy_s = now
        elif now >= self._busy_s + REST_S:
            self.cost.rest()
        self._ended = _EndedSince()
        visible = [a for a in self._pending.shares.values() if a.placed_s <= now - REPORT_LAG_S]
        for assignment in visible:
            self._pending.remove(assignment.request_id)
            prefilled = assignment.request_id in self._prefilled
            self._reported.add(assignment, prefilled=prefilled)
        self.on_change(self.worker_id)

    def assign(self, assignment: Assignment) -> None:
        """Add one request's share."""
        if assignment.num_prefill_tokens and not self.num_prompts():
            self.step_began_s = assignment.placed_s
        assert self.assigned(assignment.request_id) is None, "assigned twice"
        self._pending.add(assignment, prefilled=False)
        self.on_change(self.worker_id)

    def prefilled(self, request_id: str, now: float | None = None) -> None:
        """Record the first token of a request: nothing of its prompt is left to compute here.
        `now` is given when the token has just come.
        """
        assignment = self.assigned(request_id)
        if assignment is None or request_id in self._prefilled:
            return
        if now is not None:
            self.step_began_s = self._first_s[request_id] = now
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
        self._first_s.pop(request_id, None)
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
        left = self._reported_left()
        if reported_tokens and left <= reported_tokens:
            return seconds + reported_s * left / reported_tokens
        foreign = left - reported_tokens
        if foreign > 0:
            seconds += self.cost.prefill_s(foreign, 0, self.hello.max_batched_tokens)
        return seconds + reported_s

    def passed_s(self, now: float) -> float:
        """Return the part of `queued_s` that is over: a step of prompts counts as queued until it
        ends.
        """
        num_tokens = self.num_queued_tokens()
        if not num_tokens:
            return 0.0
        most = self.hello.max_batched_tokens or num_tokens
        step_s = self.queued_s() * min(1.0, most / num_tokens)
        return min(step_s, max(0.0, now - self.step_began_s))

    def streams_s(self, num_new_tokens: int) -> float:
        """Return the predicted seconds for which a prompt of so many tokens waits for the streams
        that decode here: the step that runs now ends first, and each step until the prompt is
        computed also computes the streams.
        """
        num_sequences = self.num_sequences()
        num_streams = num_sequences - self.num_prompts()
        if self.role is not Role.DECODE or num_streams <= 0:
            return 0.0
        context = round(self.num_context_tokens() * num_streams / num_sequences)
        step_s = self.cost.streams_s(num_streams, context)
        most = self.hello.max_batched_tokens or num_new_tokens
        num_steps = -(-(self.num_queued_tokens() + num_new_tokens) // most)
        return step_s / 2 + num_steps * (step_s - self.cost.stream_coefficients[0])

    def open_prompts(self) -> Iterator[tuple[Assignment, int]]:
        """Yield the assignments with a prompt that is not computed yet, with how many of its tokens
        the last report says are computed.
        """
        done = max(0, self._reported.outstanding()[1] - self._reported_left())
        for share in self._reported.to_compute.values():
            computed = min(done, share.num_prefill_tokens - 1)
            done -= computed
            yield share, computed
        for share in self._pending.to_compute.values():
            yield share, 0

    def open_streams(self) -> Iterator[tuple[Assignment, float]]:
        """Yield the assignments that decode here, with the time of their first token, or about."""
        for assignments in (self._reported, self._pending):
            for name, share in assignments.shares.items():
                if name not in assignments.to_compute and share.num_context_tokens:
                    yield share, self._first_s.get(name, share.placed_s)

    def num_queued_tokens(self) -> int:
        """Return the prompt tokens assigned to this worker and not yet computed."""
        return self._reported_left() + self._pending.outstanding()[1]

    def _reported_left(self) -> int:
        return max(0, self.load.num_queued_tokens - self._ended.num_prefill_tokens)

    def num_prompts(self) -> int:
        """Return the number of prompts assigned to this worker and not yet computed."""
        return len(self._pending.to_compute) + len(self._reported.to_compute)

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


class Column(IntEnum):
    """The columns kept of each view. Whole numbers are exact, because they stay below 2^53."""

    QUEUE_S = 0
    ASSIGNED = 1
    FIXED = 2
    TOKEN = 3
    PAIR = 4
    SQUARE = 5
    READ = 6
    """The last of `coefficients`: the time for each context token."""
    STREAM_FIXED = 7
    """The first of `stream_coefficients`."""
    STREAM = 8
    STREAM_READ = 9
    CHUNK = 10
    """`max_batched_tokens`."""
    NUM_BLOCKS = 11
    USABLE = 12
    """1, or 0 while the worker drains."""
    FREE_BLOCKS = 13
    SEQUENCES = 14
    CONTEXT = 15
    MAX_SEQS = 16
    STAGES = 17
    PROMPTS = 18
    QUEUED_TOKENS = 19


def _row(view: InstanceView) -> tuple[float, ...]:
    hello = view.hello
    return (
        view.queued_s(),
        view.num_assigned,
        *view.cost.coefficients,
        *view.cost.stream_coefficients,
        hello.max_batched_tokens,
        hello.num_blocks,
        not view.draining,
        view.num_free_blocks(),
        view.num_sequences(),
        view.num_context_tokens(),
        hello.max_num_seqs,
        hello.num_stages,
        view.num_prompts(),
        view.num_queued_tokens(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class FleetFacts:
    """A fleet as it was at one moment."""

    hellos: tuple[WorkerHello, ...]
    columns: Floats
    """`columns[c][i]` belongs to `hellos[i]`."""


class Fleet:
    """Live workers of one role, sorted by id; `columns[c][i]` belongs to `views[i]`."""

    def __init__(self) -> None:
        self.views: list[InstanceView] = []
        self.columns: Floats = np.zeros((len(Column), 0))
        self._ids: list[str] = []
        self._changed: dict[str, None] = {}
        self._generation = -1
        """The generation of the index when the slots were looked up."""
        self._slots: Ints = np.zeros(0, np.int64)
        self._pool_slots: Ints | None = None
        self._hellos: tuple[WorkerHello, ...] | None = ()

    def __len__(self) -> int:
        return len(self.views)

    def add(self, view: InstanceView) -> None:
        at = bisect_left(self._ids, view.worker_id)
        self._ids.insert(at, view.worker_id)
        self._hellos = None
        self.views.insert(at, view)
        self.columns = np.insert(self.columns, at, 0.0, axis=1)
        self._generation = -1
        self.touch(view.worker_id)

    def remove(self, worker_id: str) -> None:
        at = self.find(worker_id)
        del self._ids[at], self.views[at]
        self._hellos = None
        self.columns = np.delete(self.columns, at, axis=1)
        self._generation = -1
        self._changed.pop(worker_id, None)

    def touch(self, worker_id: str) -> None:
        """Record that the view of a worker has changed."""
        self._changed[worker_id] = None

    def find(self, worker_id: str) -> int:
        """Return the position of a worker (where it would be inserted, if it is unknown)."""
        return bisect_left(self._ids, worker_id)

    def refresh(self) -> Floats:
        """Bring the columns up to date and return them."""
        for worker_id in self._changed:
            at = self.find(worker_id)
            self.columns[:, at] = _row(self.views[at])
        self._changed.clear()
        return self.columns

    def facts(self) -> FleetFacts:
        """Return the fleet as it is now."""
        if self._hellos is None:
            self._hellos = tuple(view.hello for view in self.views)
        return FleetFacts(self._hellos, self.refresh().copy())

    def usable(self, exclude: Collection[str]) -> Bools:
        """Return which workers may get work. Excluded ones are used only when there is no other,
        and draining ones only after those.
        """
        usable = np.asarray(self.refresh()[Column.USABLE] > 0)
        if not usable.any():
            usable = np.ones(len(self._ids), np.bool_)
        if exclude:
            kept = np.array(usable)
            for worker_id in exclude:
                at = self.find(worker_id)
                if at < len(self._ids) and self._ids[at] == worker_id:
                    kept[at] = False
            if kept.any():
                return kept
        return usable

    def slots(self, index: PrefixIndex) -> Ints:
        """Return each worker's bit in the masks of the index."""
        if self._generation != index.generation:
            self._generation = index.generation
            slots = (index.slot_of(worker_id) for worker_id in self._ids)
            found = [NO_SLOT if slot is None else slot for slot in slots]
            self._slots, self._pool_slots = np.array(found, np.int64), None
        return self._slots

    def pool_slots(self, index: PrefixIndex, of_node: Callable[[str], int]) -> Ints:
        """Return the bit of the only pool on each worker's node, as `of_node` returns it."""
        self.slots(index)
        if self._pool_slots is None:
            found = [of_node(view.hello.node_id) for view in self.views]
            self._pool_slots = np.array(found, np.int64)
        return self._pool_slots

    def check_integrity(self) -> None:
        """Raise AssertionError when a row differs from its view."""
        rows = self.refresh().T.tolist()
        for worker_id, row, view in zip(self._ids, rows, self.views, strict=True):
            assert view.worker_id == worker_id
            assert row == [*_row(view)], f"the row of {worker_id} is stale"


def bits(mask: int, num_slots: int) -> Bools:
    """Return a mask as an array of booleans, lowest bit first."""
    size = num_slots // 8 + 1
    raw = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
    return np.asarray(np.unpackbits(raw, bitorder="little").view(np.bool_))


class PrefixLengths(Mapping[str, int]):
    """Worker id -> leading blocks of one prompt that the worker holds or is computing."""

    def __init__(
        self, index: PrefixIndex, prefix_match: PrefixMatch, among: int, inflight: Mapping[str, int]
    ) -> None:
        """`among`: bits of the workers to consider."""
        self._index = index
        self._prefix_match = prefix_match
        self._among = among
        self.inflight = inflight
        """Worker id -> leading blocks that it is computing."""
        self._lengths: Ints | None = None

    def in_fleet(self, fleet: Fleet) -> Ints:
        """Return the lengths for all workers of a fleet, in its order."""
        lengths = self._by_slot()[fleet.slots(self._index)]
        if self.inflight:
            lengths = lengths.copy()
            for worker_id, length in self.inflight.items():
                at = fleet.find(worker_id)
                if at < len(fleet) and fleet.views[at].worker_id == worker_id:
                    lengths[at] = max(lengths[at], length)
        return lengths

    def __getitem__(self, worker_id: str) -> int:
        slot = self._index.slot_of(worker_id)
        held = 0
        if slot is not None and self._among >> slot & 1:
            held = self._prefix_match.run_of(0, 1 << slot)
        held = max(held, self.inflight.get(worker_id, 0))
        if not held:
            raise KeyError(worker_id)
        return held

    def __iter__(self) -> Iterator[str]:
        mask = next(iter(self._prefix_match.region(0).masks), 0) & self._among
        for slot in np.flatnonzero(bits(mask, self._index.num_slots)):
            yield self._index.worker_at(int(slot)).worker_id
        for worker_id in self.inflight:
            slot_of = self._index.slot_of(worker_id)
            if slot_of is None or not mask >> slot_of & 1:
                yield worker_id

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _by_slot(self) -> Ints:
        if self._lengths is None:
            num_slots = self._index.num_slots
            self._lengths = np.zeros(num_slots + 8, np.int64)
            for stop, mask in self._prefix_match.runs(0, self._among):
                self._lengths[: num_slots + 8][np.flatnonzero(bits(mask, num_slots))] = stop
        return self._lengths
