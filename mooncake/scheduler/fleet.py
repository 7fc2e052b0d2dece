"""The workers of one role as columns of numbers, so that a thousand are compared in one go.

Owned by the Conductor. A cache of what the views say, nothing more: a row is made anew when its
view has changed, and the choices made from columns are those made from views one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mooncake.kvstore.index import PrefixIndex
from mooncake.scheduler.views import InstanceView

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_SLOT = -1
MANY_SLOTS = -2
"""A node with several pools."""


class Column(IntEnum):
    """What is kept of each view. Whole numbers are exact: they stay below 2^53."""

    QUEUE_S = 0
    ASSIGNED = 1
    FIXED = 2
    TOKEN = 3
    PAIR = 4
    SQUARE = 5
    CHUNK = 6
    """max_batched_tokens"""
    NUM_BLOCKS = 7
    USABLE = 8
    """1, or 0 while it drains."""
    FREE_BLOCKS = 9
    SEQUENCES = 10
    CONTEXT = 11
    MAX_SEQS = 12


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
    )


class Fleet:
    """Live workers of one role in order of their ids; `columns[c][i]` belongs to `views[i]`."""

    def __init__(self) -> None:
        self.views: list[InstanceView] = []
        self.columns: Floats = np.zeros((len(Column), 0))
        self._ids: list[str] = []
        self._changed: dict[str, None] = {}
        self._generation = -1
        """Of the index, when the slots were looked up."""
        self._slots: Ints = np.zeros(0, np.int64)
        self._pool_slots: Ints | None = None

    def __len__(self) -> int:
        return len(self.views)

    def add(self, view: InstanceView) -> None:
        """A worker has come."""
        at = bisect_left(self._ids, view.worker_id)
        self._ids.insert(at, view.worker_id)
        self.views.insert(at, view)
        self.columns = np.insert(self.columns, at, 0.0, axis=1)
        self._generation = -1
        self.touch(view.worker_id)

    def remove(self, worker_id: str) -> None:
        """A worker is gone."""
        at = self.find(worker_id)
        del self._ids[at], self.views[at]
        self.columns = np.delete(self.columns, at, axis=1)
        self._generation = -1
        self._changed.pop(worker_id, None)

    def touch(self, worker_id: str) -> None:
        """What is known of a worker has changed."""
        self._changed[worker_id] = None

    def find(self, worker_id: str) -> int:
        """Return the place of a worker."""
        return bisect_left(self._ids, worker_id)

    def refresh(self) -> Floats:
        """Bring the columns up to date and return them."""
        for worker_id in self._changed:
            at = self.find(worker_id)
            self.columns[:, at] = _row(self.views[at])
        self._changed.clear()
        return self.columns

    def usable(self, exclude: Collection[str]) -> Bools:
        """Return who takes work; excluded ones only for want of others."""
        usable = np.asarray(self.refresh()[Column.USABLE] > 0)
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
        """Return the bit of each worker in the masks of the index."""
        if self._generation != index.generation:
            self._generation = index.generation
            slots = (index.slot_of(worker_id) for worker_id in self._ids)
            found = [NO_SLOT if slot is None else slot for slot in slots]
            self._slots, self._pool_slots = np.array(found, np.int64), None
        return self._slots

    def pool_slots(self, index: PrefixIndex, of_node: Callable[[str], int]) -> Ints:
        """Return the bit of the only pool of each worker's node, as `of_node` tells it."""
        self.slots(index)
        if self._pool_slots is None:
            found = [of_node(view.hello.node_id) for view in self.views]
            self._pool_slots = np.array(found, np.int64)
        return self._pool_slots

    def check_integrity(self) -> None:
        """Raise AssertionError when a row is not what its view says."""
        columns = self.refresh()
        for at, view in enumerate(self.views):
            assert view.worker_id == self._ids[at]
            assert tuple(columns[:, at]) == _row(view), f"the row of {view.worker_id} is stale"


def bits(mask: int, num_slots: int) -> Bools:
    """Return a mask as an array of so many bits, lowest first."""
    size = num_slots // 8 + 1
    raw = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
    return np.asarray(np.unpackbits(raw, bitorder="little").view(np.bool_))
