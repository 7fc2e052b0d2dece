"""The pools as sources of prefixes: which of them hold the longest runs of a prompt and in which
tier, the cost of fetching these with the fetches already in progress there, and which hot blocks
get more copies. An engine that leaves and lends its blocks is one of them.

Owned by the Conductor. Facts only; `worker_choice` decides which run is fetched.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from mooncake.base import BlockKey, BlockSource, Role, Tier, WorkerHello, WorkerRef
from mooncake.base.bounded_map import BoundedMap
from mooncake.engine.cost import BandwidthEstimate
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch, slots_of
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.views import MANY_SLOTS, NO_SLOT, Floats, InstanceView, Ints, bits
from mooncake.scheduler.placement.worker_choice import MAX_ALTERNATIVES, StoreRun

LOCAL_COUNTERS = ("fetch_local_bytes", "fetch_local_seconds")
REMOTE_COUNTERS = ("fetch_remote_bytes", "fetch_remote_seconds")
"""Counters of engines from which the bandwidths between workers are learned."""
LOAD_COUNTERS = {
    Tier.SSD: ("ssd_blocks_read", "ssd_read_seconds"),
    Tier.OBJECT: ("object_blocks_read", "object_read_seconds"),
}
"""Counters of pool nodes from which the bandwidths of the tiers below DRAM are learned."""
RETRY_S = 60.0
"""After this many seconds without use, a tier or a network is expected to be at least as fast as
its first guess. Otherwise one that looks slower than computing would never be tried again: small
fetches over a long way look slow, and say little about a large one.
"""
HOT_BLOCKS = 128
"""This many leading blocks of each prompt are watched: what many prompts share comes first."""
HALF_LIFE_S = 60.0
MAX_WATCHED = 1 << 16
MAX_COMPARED = 1 << 14
"""How many blocks, those used last, are searched for the busiest ones: about ten milliseconds."""
MAX_CHAINS = 64
"""The most chains of busy blocks that one message names."""
MAX_OTHERS = 2
"""The number of alternative replicas that a worker is given for each source."""
FEW = 8
"""Up to this many equal pools are sorted one by one."""


class _Bandwidth(BandwidthEstimate):
    """A bandwidth that is learned from reports, and guessed again after a while without any."""

    def __init__(self, first_guess: float, latency_s: float) -> None:
        super().__init__(first_guess, latency_s)
        self._first_guess = first_guess
        self._heard_s = -math.inf

    def hear(self, num_bytes: float, seconds: float, now: float) -> None:
        """Learn from a report of what was moved since the last one, maybe nothing."""
        if num_bytes > 0:
            self.observe(num_bytes, seconds)
            self._heard_s = now
        elif now >= self._heard_s + RETRY_S:
            self.at_least(self._first_guess)


class FetchCosts:
    """Estimates the bandwidth between workers and that of the tiers below DRAM, and counts the
    blocks being fetched from each pool node. Bandwidths are learned from what workers report.

    A block below DRAM is loaded first and then fetched, so its time is that of both.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        latency_s = config.fetch_latency_s
        self._local = _Bandwidth(config.local_bytes_per_s, latency_s)
        self._remote = _Bandwidth(config.remote_bytes_per_s, latency_s)
        self._loads = {
            Tier.SSD: _Bandwidth(config.ssd_bytes_per_s, 0.0),
            Tier.OBJECT: _Bandwidth(config.object_bytes_per_s, 0.0),
        }
        self._blocks_asked: dict[str, Counter[Tier]] = {}
        """Store id and epoch -> blocks of fetches that are not known to have ended."""
        self._seen: dict[str, dict[str, float]] = {}
        self.changed: dict[str, None] = {}
        """Ids of stores whose number of blocks asked has changed; cleared by `Pools`."""

    def observe(self, worker: InstanceView, counters: Mapping[str, float], now: float) -> None:
        """Learn from what an engine has fetched since its last report, or from what a pool node has
        loaded.
        """
        if worker.role is Role.KVSTORE:
            for tier, names in LOAD_COUNTERS.items():
                num_blocks, seconds = self._since(worker.worker_id, counters, names)
                self._loads[tier].hear(num_blocks * worker.hello.block_bytes, seconds, now)
        else:
            for estimate, names in ((self._local, LOCAL_COUNTERS), (self._remote, REMOTE_COUNTERS)):
                estimate.hear(*self._since(worker.worker_id, counters, names), now)

    def _since(
        self, worker_id: str, counters: Mapping[str, float], names: tuple[str, str]
    ) -> tuple[float, float]:
        """Return by how much two counters of a worker have grown since its last report."""
        seen = self._seen.setdefault(worker_id, {})
        first, second = (counters.get(name, 0.0) for name in names)
        grown = first - seen.get(names[0], 0.0), second - seen.get(names[1], 0.0)
        seen[names[0]], seen[names[1]] = first, second
        return grown

    def forget(self, worker_id: str) -> None:
        """Drop a lost worker's counters; its successor counts from zero."""
        self._seen.pop(worker_id, None)

    def run(self, store: InstanceView, tier: Tier, first: int, num_blocks: int) -> StoreRun:
        """Return the present cost of fetching `num_blocks` blocks that lie in this tier, from block
        `first` on.
        """
        block_bytes, asked = store.hello.block_bytes, self.blocks_asked(store.worker)
        waiting_bytes = asked.total() * block_bytes
        load_fixed_s = asked[tier] * block_bytes / self._load_bytes_per_s(tier)
        load_s = block_bytes / self._load_bytes_per_s(tier)
        return StoreRun(
            store=store.worker,
            node_id=store.hello.node_id,
            tier=tier,
            first=first,
            stop=first + num_blocks,
            remote_s_per_block=block_bytes / self._remote.bytes_per_s + load_s,
            remote_fixed_s=self._remote.seconds(max(waiting_bytes, 1)) + load_fixed_s,
            local_s_per_block=block_bytes / self._local.bytes_per_s + load_s,
            local_fixed_s=self._local.seconds(max(waiting_bytes, 1)) + load_fixed_s,
        )

    def _load_bytes_per_s(self, tier: Tier) -> float:
        """Return the bandwidth with which a node loads blocks from a tier; infinite for memory."""
        estimate = self._loads.get(tier)
        return math.inf if estimate is None else estimate.bytes_per_s

    def blocks_asked(self, store: WorkerRef) -> Counter[Tier]:
        """Return the number of blocks being fetched from this store, by their tier."""
        return self._blocks_asked.get(_name(store.worker_id, store.epoch)) or Counter()

    def local_fixed_s(self, waiting_bytes: Floats, tier: Tier, loading_bytes: Floats) -> Floats:
        """Return `StoreRun.local_fixed_s` for many stores at once. `loading_bytes`: those among
        `waiting_bytes` that lie in the tier.
        """
        fetch_s = self._local.latency_s + np.maximum(waiting_bytes, 1) / self._local.bytes_per_s
        return np.asarray(fetch_s + loading_bytes / self._load_bytes_per_s(tier))

    def block_s(self, block_bytes: int) -> tuple[float, float]:
        """Return the seconds to fetch a block from the memory of the own node's pool, and from that
        of another node's.
        """
        return block_bytes / self._local.bytes_per_s, block_bytes / self._remote.bytes_per_s

    def push_s_per_block(self, block_bytes: int) -> float:
        """Return the seconds to push a block to another node."""
        return block_bytes / self._remote.bytes_per_s

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """The bandwidths as they are known now, by the names of their settings."""
        return {
            "local_bytes_per_s": self._local.bytes_per_s,
            "remote_bytes_per_s": self._remote.bytes_per_s,
            "ssd_bytes_per_s": self._loads[Tier.SSD].bytes_per_s,
            "object_bytes_per_s": self._loads[Tier.OBJECT].bytes_per_s,
        }

    def started(self, sources: Sequence[BlockSource]) -> None:
        """Record that a worker was told to fetch these sources."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            asked = self._blocks_asked.setdefault(name, Counter())
            asked[source.tier] += source.stop - source.first
            self.changed[source.store.worker_id] = None

    def ended(self, sources: Sequence[BlockSource]) -> None:
        """Undo one `started`."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            self.changed[source.store.worker_id] = None
            asked = self._blocks_asked[name]
            asked[source.tier] -= source.stop - source.first
            assert asked[source.tier] >= 0, "more fetches ended than were started"
            if not asked.total():
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
    """The live kvstore workers, and the engines that lend their blocks, by their bits in the masks
    of the index. A pool has a bit for each tier; that of its memory stands for the pool, too.
    """

    def __init__(self, index: PrefixIndex, fetch: FetchCosts) -> None:
        self._index = index
        self._fetch = fetch
        self._views: dict[str, InstanceView] = {}
        self._generation = -1
        self._by_slot: dict[int, tuple[InstanceView, Tier]] = {}
        self._slots: dict[str, dict[Tier, int]] = {}
        """Pool id -> the slots of its tiers."""
        self._by_node: dict[str, list[int]] = {}
        """Node id -> the slots of its pools' tiers."""
        self._order: Ints = np.zeros(0, np.int64)
        """The rank of each pool among all pool ids, by slot."""
        self._asked_bytes: Floats = np.zeros(0)
        """Bytes that are being fetched from each pool, by slot."""
        self._loading_bytes: Floats = np.zeros(0)
        """Bytes that are being fetched from each tier below DRAM of a pool, by slot."""
        self._tier_masks: dict[Tier, int] = {}
        """The bits of each tier below DRAM, and of memory, which counts as DRAM."""
        self._tier_slots: dict[Tier, Ints] = {}
        """The slot of a pool's tier by the slot of the pool, or `NO_SLOT`; for tiers below DRAM."""
        self._mask = self._node_mask = self._copies_mask = 0
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
    def copies_mask(self) -> int:
        """The bits of all tiers but buckets, which nodes may share: each bit is one copy."""
        self._refresh()
        return self._copies_mask

    @property
    def tier_masks(self) -> Mapping[Tier, int]:
        """The bits of memory, as `Tier.DRAM`, and of the tiers below it that there are, the nearest
        first.
        """
        self._refresh()
        return self._tier_masks

    @property
    def hellos(self) -> tuple[WorkerHello, ...]:
        """The hellos of all pools; the same object until pools come or go."""
        self._refresh()
        return self._hellos

    def of_node(self, node_id: str) -> Sequence[int]:
        """Return the bits of all tiers of a node's own pools."""
        self._refresh()
        return self._by_node.get(node_id, ())

    def slot_of_node(self, node_id: str) -> int:
        """Return the bit of a node's only pool, `NO_SLOT` or `MANY_SLOTS`."""
        pools = {self._by_slot[slot][0].worker_id for slot in self.of_node(node_id)}
        if len(pools) > 1:
            return MANY_SLOTS
        return next((self._first_slot(worker_id) for worker_id in pools), NO_SLOT)

    def slots_in(self, tier: Tier, slots: Ints) -> Ints:
        """Return the bits of one of `tier_masks` by the bits of pools; what is no pool's stays."""
        of_pools = self._tier_slots.get(tier)
        return slots if of_pools is None else np.where(slots >= 0, of_pools[slots], slots)

    def local_fixed_s(self, tier: Tier, slots: Ints) -> Floats:
        """Return `StoreRun.local_fixed_s` of these pools, for blocks in one tier of them."""
        loading = self._loading_bytes[self.slots_in(tier, slots)]
        return self._fetch.local_fixed_s(self._asked_bytes[slots], tier, loading)

    def cheapest_block_s(self) -> tuple[float, float]:
        """Return the least seconds for a block from any pool of the own node, and of another
        node.
        """
        return self._fetch.block_s(self._least_block_bytes)

    def run(self, slot: int, first: int, stop: int) -> StoreRun:
        """Return the present cost of fetching the blocks [first, stop) from a tier of a pool."""
        return self._fetch.run(*self._by_slot[slot], first, stop - first)

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
                block_bytes, asked = view.hello.block_bytes, self._fetch.blocks_asked(view.worker)
                for tier, slot in self._slots[worker_id].items():
                    self._asked_bytes[slot] = asked.total() * block_bytes
                    self._loading_bytes[slot] = asked[tier] * block_bytes
        self._fetch.changed.clear()

    def _first_slot(self, worker_id: str) -> int:
        return next(iter(self._slots[worker_id].values()))

    def _rebuild(self) -> None:
        self._generation = self._index.generation
        size = self._index.num_slots + 8
        self._hellos = tuple(view.hello for view in self._views.values())
        self._by_slot, self._by_node, self._slots = {}, {}, {}
        self._mask = self._node_mask = self._copies_mask = 0
        self._order, self._asked_bytes = np.zeros(size, np.int64), np.zeros(size)
        self._loading_bytes = np.zeros(size)
        masks = dict.fromkeys((Tier.DRAM, *LOAD_COUNTERS), 0)
        self._tier_slots = {tier: np.full(size, NO_SLOT) for tier in LOAD_COUNTERS}
        sizes = (view.hello.block_bytes for view in self._views.values())
        self._least_block_bytes = min(sizes, default=0)
        for place, worker_id in enumerate(sorted(self._views)):
            slots = self._slots[worker_id] = self._index.tier_slots(worker_id)
            assert slots, "a pool the index does not know"
            view = self._views[worker_id]
            for tier, slot in slots.items():
                self._by_slot[slot] = view, tier
                self._by_node.setdefault(view.hello.node_id, []).append(slot)
                self._order[slot] = place
                self._mask |= 1 << slot
                if view.role is Role.KVSTORE:
                    self._node_mask |= 1 << slot
                    self._copies_mask |= (tier is not Tier.OBJECT) << slot
                if tier.is_below_dram:
                    masks[tier] |= 1 << slot
                    self._tier_slots[tier][self._first_slot(worker_id)] = slot
                else:
                    masks[Tier.DRAM] |= 1 << slot
            self._fetch.changed[worker_id] = None
        self._tier_masks = {tier: mask for tier, mask in masks.items() if mask}


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
            key=lambda run: (
                run.tier.nearness, -run.stop, run.remote_fixed_s, run.store.worker_id
            ),
            default=None,
        )  # fmt: skip

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
            found.append(run.source(run.stop))
            first = run.stop

    def with_others(self, sources: Sequence[BlockSource]) -> list[BlockSource]:
        """Add to each source the other pools that hold its blocks, or most of them: the nearest
        tier first, then the longest run, then the fewest bytes asked for.
        """
        found = []
        for source in sources:
            runs = self.longest(source.first)
            others = [run.store for run in runs if run.store != source.store][:MAX_OTHERS]
            found.append(msgspec.structs.replace(source, others=others))
        return found

    def _find(self, first: int) -> Iterator[StoreRun]:
        wanted = MAX_ALTERNATIVES
        for tier_mask in self._pools.tier_masks.values():
            for stop, mask in self._prefix_match.runs(first, tier_mask):
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
