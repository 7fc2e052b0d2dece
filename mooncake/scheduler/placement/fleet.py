"""The workers of one role as columns of numbers, so that a thousand are compared at once.

Owned by the Conductor. It is only a cache of the views: a row is computed again when its view has
changed, and choices made from columns equal those made from views one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mooncake.base import WorkerHello
from mooncake.kvstore.index.prefix_index import PrefixIndex
from mooncake.scheduler.placement.views import InstanceView

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_SLOT = -1
MANY_SLOTS = -2
"""Stands for a node with several pools."""


class Column(IntEnum):
    """The columns kept of each view. Whole numbers are exact, because they stay below 2^53."""

    QUEUE_S = 0
    ASSIGNED = 1
    FIXED = 2
    TOKEN = 3
    PAIR = 4
    SQUARE = 5
    READ = 6
    """The last coefficient: the time for each context token."""
    CHUNK = 7
    """`max_batched_tokens`."""
    NUM_BLOCKS = 8
    USABLE = 9
    """1, or 0 while the worker drains."""
    FREE_BLOCKS = 10
    SEQUENCES = 11
    CONTEXT = 12
    MAX_SEQS = 13
    STAGES = 14


def _row(view: InstanceView) -> tuple[float, ...]:
    hello = view.hello
    return (
        view.queued_s(),
        view.num_assigned,
        *view.cost.coefficients,
        hello.max_batched_tokens,
        hello.num_blocks,
        not view.draining,
        view.num_free_blocks(),
        view.num_sequences(),
        view.num_context_tokens(),
        hello.max_num_seqs,
        hello.num_stages,
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
        columns = self.refresh()
        for at, view in enumerate(self.views):
            assert view.worker_id == self._ids[at]
            assert tuple(columns[:, at]) == _row(view), f"the row of {view.worker_id} is stale"


def bits(mask: int, num_slots: int) -> Bools:
    """Return a mask as an array of booleans, lowest bit first."""
    size = num_slots // 8 + 1
    raw = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
    return np.asarray(np.unpackbits(raw, bitorder="little").view(np.bool_))
