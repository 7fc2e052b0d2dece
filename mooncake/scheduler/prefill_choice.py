"""Which prefill worker computes a prompt, and which blocks it fetches instead of computing them.

Pure. `KvCacheCentric` is the paper's Algorithm 1 (Mooncake, FAST'25, section 6.1) with its gaps
closed: the least of recompute, local fetch and remote fetch rather than a ratio test alone, a
worker without any match costs no division by zero, the sender's queue counts, and so does the time
a local pool takes. The other policies stand behind the same port for comparison.

Time is concave in the length of a fetched run (attention makes the first blocks the cheapest to
compute), so the best length is always where one holder's run ends: only those are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake.base import BlockSource, IdSource, WorkerRef
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.views import InstanceView

MAX_REMOTE_STORES = 3
"""Of the pool nodes with longer prefixes, so many (longest first) are weighed for each worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMatch:
    """A pool node that holds the first `num_blocks` blocks of the prompt."""

    store: WorkerRef
    node_id: str
    num_blocks: int
    fetch_s_per_block: float
    fetch_fixed_s: float
    """Latency, and what other fetches from this node will take first."""
    local_s_per_block: float
    local_fixed_s: float
    """The same for a reader on the pool's own node."""

    def fetch_s(self, num_blocks: int, *, local: bool) -> float:
        """Return the predicted seconds to fetch so many blocks."""
        if num_blocks <= 0:
            return 0.0
        if local:
            return self.local_fixed_s + num_blocks * self.local_s_per_block
        return self.fetch_fixed_s + num_blocks * self.fetch_s_per_block


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillQuery:
    """One prompt and who holds a part of it."""

    num_tokens: int
    """Prompt, and output so far when a request is placed again."""
    block_tokens: int
    own_matches: Mapping[str, int]
    """Worker id of an engine -> leading blocks in its HBM, or being computed there."""
    stores: Sequence[StoreMatch]
    """Pool nodes with a match, longest first."""

    @property
    def max_cached_blocks(self) -> int:
        """The last token is always computed: its output is what is wanted."""
        return (self.num_tokens - 1) // self.block_tokens

    def own_blocks(self, worker_id: str) -> int:
        """Return how many leading blocks the worker has itself."""
        return min(self.own_matches.get(worker_id, 0), self.max_cached_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOption:
    """One way to compute the prompt."""

    view: InstanceView
    num_cached_blocks: int
    num_new_tokens: int
    sources: tuple[BlockSource, ...]
    queue_s: float
    fetch_s: float
    compute_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.compute_s

    @property
    def num_fetch_blocks(self) -> int:
        return sum(source.stop - source.first for source in self.sources)


class PrefillPolicy(Protocol):
    """How a prefill worker is chosen."""

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        """Return the chosen option, or None when there are no instances."""


class KvCacheCentric:
    """Least predicted TTFT over all workers and all ways to get the prefix."""

    def __init__(self, balancing_threshold: float) -> None:
        self._threshold = balancing_threshold

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        best: PrefillOption | None = None
        for view in instances:
            queue_s = view.queued_s()
            if best is not None and queue_s >= best.ttft_s:
                continue
            option = best_option(query, view, queue_s, self._threshold)
            if best is None or _rank(option) < _rank(best):
                best = option
        return best


class LocalCacheAware:
    """Least predicted TTFT with what a worker and its own node hold; nothing comes from afar."""

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        options = [local_option(query, view, view.queued_s()) for view in instances]
        return min(options, key=_rank, default=None)


class LoadBalance:
    """The shortest queue, whatever is cached where."""

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        ranked = [(view.queued_s(), view.num_assigned, view.worker_id, view) for view in instances]
        if not ranked:
            return None
        queue_s, _, _, view = min(ranked, key=lambda entry: entry[:3])
        return local_option(query, view, queue_s)


class RoundRobin:
    """Each in turn, by worker id."""

    def __init__(self) -> None:
        self._last_id = ""

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        if not instances:
            return None
        ordered = sorted(instances, key=lambda view: view.worker_id)
        after = [view for view in ordered if view.worker_id > self._last_id]
        view = (after or ordered)[0]
        self._last_id = view.worker_id
        return local_option(query, view, view.queued_s())


class RandomChoice:
    """Any, by the identifiers' source (so a seed replays it)."""

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids

    def choose(
        self, query: PrefillQuery, instances: Sequence[InstanceView]
    ) -> PrefillOption | None:
        if not instances:
            return None
        view = instances[self._ids.integer(32) % len(instances)]
        return local_option(query, view, view.queued_s())


def make_policy(config: SchedulerConfig, ids: IdSource) -> PrefillPolicy:
    """Return the policy the configuration names (its names are checked there)."""
    makers: dict[str, Callable[[], PrefillPolicy]] = {
        "kvcache-centric": lambda: KvCacheCentric(config.kvcache_balancing_threshold),
        "local-cache-aware": LocalCacheAware,
        "load-balance": LoadBalance,
        "round-robin": RoundRobin,
        "random": lambda: RandomChoice(ids),
    }
    return makers[config.policy]()


def local_option(query: PrefillQuery, view: InstanceView, queue_s: float) -> PrefillOption:
    """Return the quicker of: use what the worker has, or also fetch from its own node's pool."""
    own = query.own_blocks(view.worker_id)
    options = [_option(query, view, queue_s, own, ())]
    store = _local_store(query, view)
    if store is not None and store.num_blocks > own:
        options.append(_option(query, view, queue_s, own, ((store, store.num_blocks),)))
    return min(options, key=_rank)


def best_option(
    query: PrefillQuery, view: InstanceView, queue_s: float, threshold: float
) -> PrefillOption:
    """Return the quickest way for this worker: recompute, or fetch from its own node's pool, from
    another's, or first the one and then the other.

    Another node is asked only where its prefix is longer than `threshold` times the local one.
    """
    own = query.own_blocks(view.worker_id)
    best = local_option(query, view, queue_s)
    local = _local_store(query, view)
    here = max(own, local.num_blocks if local is not None else 0)
    tried = 0
    for store in query.stores:
        if tried == MAX_REMOTE_STORES or store.num_blocks <= max(here, threshold * here):
            break
        if store.node_id == view.hello.node_id:
            continue
        tried += 1
        plans: list[tuple[tuple[StoreMatch, int], ...]] = [((store, store.num_blocks),)]
        if local is not None and local.num_blocks > own:
            plans.append(((local, local.num_blocks), (store, store.num_blocks)))
        options = [_option(query, view, queue_s, own, plan) for plan in plans]
        best = min([best, *options], key=_rank)
    return best


def _local_store(query: PrefillQuery, view: InstanceView) -> StoreMatch | None:
    for store in query.stores:
        if store.node_id == view.hello.node_id:
            return store
    return None


def _option(
    query: PrefillQuery,
    view: InstanceView,
    queue_s: float,
    own_blocks: int,
    plan: Sequence[tuple[StoreMatch, int]],
) -> PrefillOption:
    """Return the option that fetches, store by store, up to the block each one names."""
    have, fetch_s = own_blocks, 0.0
    sources: list[BlockSource] = []
    for store, wanted in plan:
        stop = min(wanted, query.max_cached_blocks)
        if stop <= have:
            continue
        sources.append(BlockSource(store=store.store, first=have, stop=stop))
        fetch_s += store.fetch_s(stop - have, local=store.node_id == view.hello.node_id)
        have = stop
    context = have * query.block_tokens
    num_new = query.num_tokens - context
    return PrefillOption(
        view=view,
        num_cached_blocks=have,
        num_new_tokens=num_new,
        sources=tuple(sources),
        queue_s=queue_s,
        fetch_s=fetch_s,
        compute_s=view.cost.prefill_s(num_new, context, view.hello.max_batched_tokens),
    )


def _rank(option: PrefillOption) -> tuple[float, int, str]:
    """Quickest first; then whoever has less to do; then by name, so that equal worlds choose
    alike.
    """
    return option.ttft_s, option.view.num_assigned, option.view.worker_id
