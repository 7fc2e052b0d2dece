"""The pools as sources of prefixes: which of them hold the longest runs of a prompt, and the cost
of fetching these. An engine that leaves and lends its blocks is one of them.

Owned by the Conductor. Facts only; `prefill_choice` decides which run is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mooncake.base import BlockSource, Role, WorkerHello
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch, slots_of
from mooncake.scheduler.placement.fetch_costs import FetchCosts
from mooncake.scheduler.placement.fleet import MANY_SLOTS, NO_SLOT, Floats, Ints, bits
from mooncake.scheduler.placement.prefill_choice import MAX_ALTERNATIVES, StoreRun
from mooncake.scheduler.placement.views import InstanceView

MAX_OTHERS = 2
"""The number of alternative replicas that a worker is given for each source."""
FEW = 8
"""Up to this many equal pools are sorted one by one."""


class Pools:
    """The live kvstore workers, and the engines that lend their blocks, by their bit in the masks
    of the index.
    """

    def __init__(self, index: PrefixIndex, fetch: FetchCosts) -> None:
        self._index = index
        self._fetch = fetch
        self._views: dict[str, InstanceView] = {}
        self._generation = -1
        self._by_slot: dict[int, InstanceView] = {}
        self._by_node: dict[str, list[int]] = {}
        self._order: Ints = np.zeros(0, np.int64)
        """The rank of each pool among all pool ids, by slot."""
        self._asked_bytes: Floats = np.zeros(0)
        """Bytes that are being fetched from each pool, by slot."""
        self._mask = self._node_mask = 0
        self._least_block_bytes = 0
        self._hellos: tuple[WorkerHello, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Number of pool nodes."""
        return sum(view.role is Role.KVSTORE for view in self._views.values())

    def add(self, view: InstanceView) -> None:
        """Add a pool. A known pool changes nothing."""
        if view.worker_id not in self._views:
            self._views[view.worker_id] = view
            self._generation = -1

    def remove(self, worker_id: str) -> None:
        """Remove a pool. An unknown pool changes nothing."""
        if self._views.pop(worker_id, None) is not None:
            self._generation = -1

    @property
    def mask(self) -> int:
        """The bits of all pools."""
        self._refresh()
        return self._mask

    @property
    def node_mask(self) -> int:
        """The bits of the pool nodes, without engines."""
        self._refresh()
        return self._node_mask

    @property
    def hellos(self) -> tuple[WorkerHello, ...]:
        """Those of all pools; the same object until pools come or go."""
        self._refresh()
        return self._hellos

    def view(self, slot: int) -> InstanceView:
        """Return the pool of a bit."""
        return self._by_slot[slot]

    def of_node(self, node_id: str) -> Sequence[int]:
        """Return the bits of a node's own pools."""
        self._refresh()
        return self._by_node.get(node_id, ())

    def slot_of_node(self, node_id: str) -> int:
        """Return the bit of a node's only pool, `NO_SLOT` or `MANY_SLOTS`."""
        slots = self.of_node(node_id)
        return slots[0] if len(slots) == 1 else MANY_SLOTS if slots else NO_SLOT

    def local_fixed_s(self, slots: Ints) -> Floats:
        """Return `StoreRun.local_fixed_s` of these pools."""
        return self._fetch.local_fixed_s(self._asked_bytes[slots])

    def cheapest_block_s(self) -> tuple[float, float]:
        """Return the least seconds for a block from any pool of the own node, and of another
        node.
        """
        return self._fetch.block_s(self._least_block_bytes)

    def run(self, slot: int, first: int, stop: int) -> StoreRun:
        """Return the present cost of fetching the blocks [first, stop) from a pool."""
        return self._fetch.run(self._by_slot[slot], first, stop - first)

    def cheapest(self, mask: int, count: int) -> Sequence[int]:
        """Return up to `count` of the pools in `mask`, by bytes asked, then by id."""
        self._refresh()
        if mask.bit_count() <= FEW:
            few = slots_of(mask)
            few.sort(key=lambda slot: (self._asked_bytes[slot], self._order[slot]))
            return few[:count]
        slots = np.flatnonzero(bits(mask, self._index.num_slots))
        least = np.lexsort((self._order[slots], self._asked_bytes[slots]))[:count]
        return [int(slot) for slot in slots[least]]

    def _refresh(self) -> None:
        if self._generation != self._index.generation:
            self._rebuild()
        for worker_id in self._fetch.changed:
            view = self._views.get(worker_id)
            if view is not None:
                slot = self._index.slot_of(worker_id)
                asked = self._fetch.blocks_asked(view.worker) * view.hello.block_bytes
                self._asked_bytes[slot] = asked
        self._fetch.changed.clear()

    def _rebuild(self) -> None:
        self._generation = self._index.generation
        size = self._index.num_slots + 8
        self._hellos = tuple(view.hello for view in self._views.values())
        self._by_slot, self._by_node = {}, {}
        self._mask = self._node_mask = 0
        self._order, self._asked_bytes = np.zeros(size, np.int64), np.zeros(size)
        sizes = (view.hello.block_bytes for view in self._views.values())
        self._least_block_bytes = min(sizes, default=0)
        for place, worker_id in enumerate(sorted(self._views)):
            slot = self._index.slot_of(worker_id)
            assert slot is not None, "a pool the index does not know"
            view = self._views[worker_id]
            self._by_slot[slot] = view
            self._by_node.setdefault(view.hello.node_id, []).append(slot)
            self._order[slot] = place
            self._mask |= 1 << slot
            if view.role is Role.KVSTORE:
                self._node_mask |= 1 << slot
            self._fetch.changed[worker_id] = None


class PoolSources:
    """`Sources` of one prompt: its prefix match as runs of pools. Each run is computed once."""

    def __init__(self, pools: Pools, prefix_match: PrefixMatch) -> None:
        self._pools = pools
        self._prefix_match = prefix_match
        self._longest: dict[int, Sequence[StoreRun]] = {}
        self._runs: dict[tuple[int, int], StoreRun] = {}

    def longest(self, first: int) -> Sequence[StoreRun]:
        """See `Sources`."""
        runs = self._longest.get(first)
        if runs is None:
            runs = self._longest[first] = list(self._find(first))
        return runs

    def local(self, first: int, node_id: str) -> StoreRun | None:
        """See `Sources`."""
        slots = self._pools.of_node(node_id)
        stops = [(self._prefix_match.run_of(first, 1 << slot), slot) for slot in slots]
        runs = [self._run(slot, first, stop) for stop, slot in stops if stop > first]
        return min(
            runs,
            key=lambda run: (-run.stop, run.remote_fixed_s, run.store.worker_id),
            default=None,
        )

    def with_others(self, sources: Sequence[BlockSource]) -> list[BlockSource]:
        """Add to each source the other pools that hold its blocks, or most of them: the longest run
        first, then the fewest bytes asked for.
        """
        found = []
        for source in sources:
            runs = self.longest(source.first)
            others = [run.store for run in runs if run.store != source.store][:MAX_OTHERS]
            found.append(
                BlockSource(store=source.store, first=source.first, stop=source.stop, others=others)
            )
        return found

    def _find(self, first: int) -> Iterator[StoreRun]:
        wanted = MAX_ALTERNATIVES
        for stop, mask in self._prefix_match.runs(first, self._pools.mask):
            for slot in self._pools.cheapest(mask, wanted):
                yield self._run(slot, first, stop)
                wanted -= 1
            if not wanted:
                return

    def _run(self, slot: int, first: int, stop: int) -> StoreRun:
        run = self._runs.get((slot, first))
        if run is None:
            run = self._runs[slot, first] = self._pools.run(slot, first, stop)
        return run
