"""The pools as sources of prefixes: which of them hold the longest runs of a prompt, the cost of
fetching these with the fetches already in progress there, and which hot blocks get more copies. An
engine that leaves and lends its blocks is one of them.

Owned by the Conductor. Facts only; `worker_choice` decides which run is fetched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockKey, BlockSource, Role, WorkerHello, WorkerRef
from mooncake.base.bounded_map import BoundedMap
from mooncake.engine.cost import BandwidthEstimate
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch, slots_of
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.views import MANY_SLOTS, NO_SLOT, Floats, InstanceView, Ints, bits
from mooncake.scheduler.placement.worker_choice import MAX_ALTERNATIVES, StoreRun

LOCAL_COUNTERS = ("fetch_local_bytes", "fetch_local_seconds")
REMOTE_COUNTERS = ("fetch_remote_bytes", "fetch_remote_seconds")
"""Counters of `WorkerLoad` from which the bandwidths are learned."""
HOT_BLOCKS = 128
"""This many leading blocks of each prompt are watched: what many prompts share comes first."""
HALF_LIFE_S = 60.0
MAX_WATCHED = 1 << 16
MAX_COMPARED = 1 << 14
"""The busiest blocks are found among so many that were used last, in about ten milliseconds."""
MAX_CHAINS = 64
"""So many of the busiest chains are named at most."""
MAX_OTHERS = 2
"""The number of alternative replicas that a worker is given for each source."""
FEW = 8
"""Up to this many equal pools are sorted one by one."""


class FetchCosts:
    """Estimates local and remote bandwidth, and counts the blocks being fetched from each pool
    node. Bandwidths are learned from the bytes and seconds that workers report.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        latency_s = config.fetch_latency_s
        self._local = BandwidthEstimate(config.local_bytes_per_s, latency_s)
        self._remote = BandwidthEstimate(config.remote_bytes_per_s, latency_s)
        self._blocks_asked: dict[str, int] = {}
        """Store id and epoch -> blocks of fetches that are not known to have ended."""
        self._seen: dict[str, dict[str, float]] = {}
        self.changed: dict[str, None] = {}
        """Ids of stores whose number of blocks asked has changed; cleared by `Pools`."""

    def observe(self, worker_id: str, counters: Mapping[str, float]) -> None:
        """Learn from what a worker has fetched since its last report."""
        seen = self._seen.setdefault(worker_id, {})
        for estimate, names in ((self._local, LOCAL_COUNTERS), (self._remote, REMOTE_COUNTERS)):
            num_bytes, seconds = (counters.get(name, 0.0) - seen.get(name, 0.0) for name in names)
            estimate.observe(num_bytes, seconds)
        self._seen[worker_id] = {
            name: counters[name] for name in (*LOCAL_COUNTERS, *REMOTE_COUNTERS) if name in counters
        }

    def forget(self, worker_id: str) -> None:
        """Drop a lost worker's counters; its successor counts from zero."""
        self._seen.pop(worker_id, None)

    def run(self, store: InstanceView, first: int, num_blocks: int) -> StoreRun:
        """Return the present cost of fetching `num_blocks` blocks, from block `first` on."""
        block_bytes = store.hello.block_bytes
        waiting_bytes = self.blocks_asked(store.worker) * block_bytes
        return StoreRun(
            store=store.worker,
            node_id=store.hello.node_id,
            first=first,
            stop=first + num_blocks,
            remote_s_per_block=block_bytes / self._remote.bytes_per_s,
            remote_fixed_s=self._remote.seconds(max(waiting_bytes, 1)),
            local_s_per_block=block_bytes / self._local.bytes_per_s,
            local_fixed_s=self._local.seconds(max(waiting_bytes, 1)),
        )

    def blocks_asked(self, store: WorkerRef) -> int:
        """Return the number of blocks being fetched from this store."""
        return self._blocks_asked.get(_name(store.worker_id, store.epoch), 0)

    def local_fixed_s(self, waiting_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `StoreRun.local_fixed_s` for many stores at once."""
        return self._local.latency_s + np.maximum(waiting_bytes, 1) / self._local.bytes_per_s

    def block_s(self, block_bytes: int) -> tuple[float, float]:
        """Return the seconds to fetch a block from the own node's pool, and from another node's."""
        return block_bytes / self._local.bytes_per_s, block_bytes / self._remote.bytes_per_s

    def push_s_per_block(self, block_bytes: int) -> float:
        """Return the seconds to push a block to another node."""
        return block_bytes / self._remote.bytes_per_s

    @property
    def bytes_per_s(self) -> tuple[float, float]:
        """The bandwidth from the own node's pool, and from another's."""
        return self._local.bytes_per_s, self._remote.bytes_per_s

    def started(self, sources: Sequence[BlockSource]) -> None:
        """Record that a worker was told to fetch these sources."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            blocks = source.stop - source.first
            self._blocks_asked[name] = self._blocks_asked.get(name, 0) + blocks
            self.changed[source.store.worker_id] = None

    def ended(self, sources: Sequence[BlockSource]) -> None:
        """Undo one `started`."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            self.changed[source.store.worker_id] = None
            left = self._blocks_asked[name] - (source.stop - source.first)
            assert left >= 0, "more fetches ended than were started"
            if left:
                self._blocks_asked[name] = left
            else:
                del self._blocks_asked[name]

    def check_idle(self) -> None:
        """Raise AssertionError when a fetch is recorded although none is in progress."""
        assert not self._blocks_asked, "fetches are recorded that are not in progress"


def _name(worker_id: str, epoch: str) -> str:
    return f"{worker_id}/{epoch}"


class _Heat:
    """Uses of one block; old ones count less."""

    __slots__ = ("at_s", "parent", "uses")

    def __init__(self, parent: BlockKey | None, now: float) -> None:
        """`parent`: the block before it in its chain."""
        self.parent = parent
        self.uses = 0.0
        self.at_s = now

    def fading(self, now: float) -> float:
        """Return the share of the uses that still counts."""
        return math.exp2((self.at_s - now) / HALF_LIFE_S)

    @property
    def rank(self) -> float:
        """Orders blocks by what their uses count at any one time."""
        return math.log2(self.uses) + self.at_s / HALF_LIFE_S


class Replication:
    """Computes how many copies blocks should have: hot blocks get more before many readers queue
    for one. Also tells which blocks are the busiest, for an engine that has none yet.

    The heat of a block is a rate of uses that halves with time. A copy is made where a prompt with
    it is computed anyway: the prefill worker also puts the reused blocks into the pool of its own
    node (Mooncake, FAST'25, 6.1: the copy stays where it was fetched to). Copies that are not used
    any more are evicted by their pool like any other block.
    """

    def __init__(self, uses_per_s_per_copy: float) -> None:
        """`uses_per_s_per_copy`: 0 = no replication."""
        self._copies_per_use = (
            math.log(2) / HALF_LIFE_S / uses_per_s_per_copy if uses_per_s_per_copy else 0.0
        )
        self._heat: BoundedMap[BlockKey, _Heat] = BoundedMap(MAX_WATCHED)
        """The block used last is last; those not used for the longest time are dropped first."""

    def __len__(self) -> int:
        """Return how many blocks are watched."""
        return len(self._heat)

    def on_use(
        self, keys: Sequence[BlockKey], copies: Iterable[int], max_copies: int, now: float
    ) -> int:
        """Record that a prompt uses the blocks `keys`, of which `copies` pools each hold a copy.
        Returns how many leading blocks should get a copy on the node that computes the prompt: up
        to the last block that is too hot for its copies.
        """
        length = 0
        parent: BlockKey | None = None
        at_s, faded, per_use = now, 1.0, self._copies_per_use
        for index, (key, num_copies) in enumerate(zip(keys[:HOT_BLOCKS], copies, strict=False)):
            heat = self._heat.use(key)
            if heat is None:
                heat = self._heat[key] = _Heat(parent, now)
            parent = key
            if heat.at_s != at_s:  # what is used together was mostly used together before
                at_s, faded = heat.at_s, heat.fading(now)
            heat.uses = heat.uses * faded + 1
            heat.at_s = now
            wanted = heat.uses * per_use
            if wanted > 1 and num_copies < min(max_copies, math.ceil(wanted)) > 1:
                length = index + 1
        return length

    def busiest(self, num_blocks: int) -> list[list[BlockKey]]:
        """Return the `num_blocks` blocks with the most uses, as chains from their first block on:
        those of the `MAX_CHAINS` chains whose ends were used most. Chains may have the same head.
        Blocks that were used once, or not for long, are left out.
        """
        latest = list(islice(reversed(self._heat.items()), MAX_COMPARED))
        again = [(key, heat) for key, heat in reversed(latest) if heat.uses > 1]
        chosen: dict[BlockKey, BlockKey | None] = {}
        # Of equals the one used first comes first: a block never comes before its parent.
        for key, heat in heapq.nlargest(num_blocks, again, key=lambda entry: entry[1].rank):
            if heat.parent is None or heat.parent in chosen:
                chosen[key] = heat.parent
        chains = []
        inner = set(chosen.values())
        for last in islice((key for key in chosen if key not in inner), MAX_CHAINS):
            chain: list[BlockKey] = []
            at: BlockKey | None = last
            while at is not None:
                chain.append(at)
                at = chosen[at]
            chains.append(chain[::-1])
        return chains

    def forget(self) -> None:
        """Forget all uses: from now on the same prompts have other blocks."""
        self._heat.clear()


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

    def cover(self, node_id: str, *, remote: bool) -> list[BlockSource]:
        """Return from where a worker on this node reads all that the pools hold of the prompt's
        prefix. `remote`: it may read from other nodes.
        """
        found: list[BlockSource] = []
        first = 0
        while True:
            own = self.local(first, node_id)
            runs = [*([own] if own is not None else ()), *(self.longest(first) if remote else ())]
            if not runs:
                return self.with_others(found) if remote else found
            run = max(runs, key=lambda run: run.stop)
            found.append(BlockSource(store=run.store, first=first, stop=run.stop))
            first = run.stop

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
