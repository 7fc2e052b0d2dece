"""The choice of a prefill worker, and of the blocks that it fetches instead of computing them; and
of a decode worker, by predicted gap between tokens and room in blocks (`choose_decode`). Pure.

`LeastTtft` is the paper's Algorithm 1 (Mooncake, FAST'25, section 6.1) with some additions:
the least of recompute, local fetch and remote fetch instead of a ratio test alone, no division by
zero for workers without a match, the queue of the sender, and the time of a local fetch. The other
policies implement the same port, for comparison.

Time is concave in the length of a fetched run: attention makes the first blocks the cheapest to
compute. So the best length is always where one holder's run ends, and only those lengths are tried.
A prefix may be gathered from several pools, run by run: the blocks of an earlier answer lie on the
node that decoded it, those of its prompt on the node that prefilled it. A run lies in one tier, so
what a disk or a bucket would bring too late is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Annotated, Protocol

import msgspec

from mooncake.base import BlockSource, IdSource, Tier, WorkerRef
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.views import InstanceView

WORK_WEIGHT = 0.1
"""This share of the work is added to the time. Of two ways that are about equally fast, the one
that keeps the cluster less busy is then chosen.
"""
MAX_RUNS = 8
"""A prefix is gathered from at most this many pools in turn."""
MAX_ALTERNATIVES = 3
"""At most this many holders of the first run are compared, the longest run first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRun:
    """A pool node that holds the blocks [first, stop) of the prompt in one tier and in none that is
    nearer, and the cost of a fetch.
    """

    store: WorkerRef
    node_id: str
    tier: Tier
    first: int
    stop: int
    remote_s_per_block: float
    """The time to load a block into DRAM, if it lies below, and to fetch it."""
    remote_fixed_s: float
    """Latency, and the time that other fetches from this node take first."""
    local_s_per_block: float
    local_fixed_s: float
    """The same for a reader on the pool's own node."""

    def fetch_s(self, num_blocks: int, *, local: bool) -> float:
        """Return the predicted seconds to fetch `num_blocks` blocks."""
        if local:
            return self.local_fixed_s + num_blocks * self.local_s_per_block
        return self.remote_fixed_s + num_blocks * self.remote_s_per_block

    def source(self, stop: int) -> BlockSource:
        """Return where a worker reads the blocks before `stop`."""
        return BlockSource(store=self.store, first=self.first, stop=stop, tier=self.tier)


class Sources(Protocol):
    """Finds the pools that hold a run of the prompt's blocks."""

    def longest(self, first: int) -> Sequence[StoreRun]:
        """Return the runs of the nearest tiers that begin with block `first`, at most
        `MAX_ALTERNATIVES`: of a tier the longest first, then the cheapest to reach, then by name.
        """

    def local(self, first: int, node_id: str) -> StoreRun | None:
        """Return the best run of a node's own pools, by the same order."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request asks of the pair: numbers, and no tokens."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Prompt and output so far."""
    num_output_tokens: int
    """Output tokens expected from now on."""
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    push_s_per_block: float
    exclude: list[str]
    """Workers that are used only when there is no other."""
    tbt_slo_s: float | None
    max_whole_tokens: int
    """The most new tokens with which it may run on its decode worker alone."""

    @property
    def max_cached_blocks(self) -> int:
        """The most blocks that can be reused. The last token is always computed, because its logits
        are needed.
        """
        return (self.num_tokens - 1) // self.block_tokens

    @property
    def num_blocks_now(self) -> int:
        """Blocks needed to join a batch: for all tokens so far and the next one."""
        return -(-(self.num_tokens + 1) // self.block_tokens)

    @property
    def num_blocks_expected(self) -> int:
        """Blocks held when the expected output is complete."""
        return -(-(self.num_tokens + max(self.num_output_tokens, 1)) // self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One request, and the workers that hold a part of its tokens."""

    wanted: Wanted
    own_matches: Mapping[str, int]
    """Worker id of an engine -> leading blocks in its HBM, or being computed there."""
    sources: Sources

    def own_blocks(self, worker_id: str) -> int:
        """Return how many leading blocks the worker holds itself, of those that can be reused."""
        return min(self.own_matches.get(worker_id, 0), self.wanted.max_cached_blocks)


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
    """The time of all chunks, in the slowest stage of a worker."""
    tail_s: float
    """The time of the last chunk, in the worker's other stages."""
    streams_s: float
    """The time that streams of the same worker take meanwhile."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.compute_s + self.tail_s + self.streams_s

    @property
    def score_s(self) -> float:
        """The time to the first token plus a share of the work; the smallest is best."""
        return self.ttft_s + WORK_WEIGHT * (self.fetch_s + self.compute_s)

    @property
    def num_fetch_blocks(self) -> int:
        return sum(source.stop - source.first for source in self.sources)

    @property
    def fetch_blocks(self) -> dict[str, int]:
        """How many blocks are fetched from each tier."""
        found: dict[str, int] = {}
        for source in self.sources:
            number = found.get(source.tier.value, 0)
            found[source.tier.value] = number + source.stop - source.first
        return found


class PrefillPolicy(Protocol):
    """A way to choose a prefill worker."""

    def choose(self, query: Query, instances: Sequence[InstanceView]) -> PrefillOption | None:
        """Return the chosen option, or None when there are no instances."""


class OptionMaker:
    """Called with (prompt, worker, its queue in seconds). Returns the fastest way for this worker
    to get the prefix.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways

    def __call__(self, query: Query, view: InstanceView, queue_s: float) -> PrefillOption:
        chains = self.ways(query, query.own_blocks(view.worker_id), view.hello.node_id)
        options = [_option(query, view, queue_s, chain) for chain in chains]
        return min(options, key=lambda option: option.score_s)


class LeastTtft:
    """Chooses the least predicted TTFT, plus a share of the work, over all workers. With remote
    fetches this is kvcache-centric scheduling, without them local-cache-aware.
    """

    def __init__(self, make: OptionMaker) -> None:
        self._make = make

    def choose(self, query: Query, instances: Sequence[InstanceView]) -> PrefillOption | None:
        best: PrefillOption | None = None
        for view in instances:
            queue_s = view.queued_s()
            if best is not None and queue_s > best.score_s:
                continue
            option = self._make(query, view, queue_s)
            if best is None or rank(option) < rank(best):
                best = option
        return best


class LoadBalance:
    """Chooses the shortest queue, regardless of cached prefixes."""

    def __init__(self, make: OptionMaker) -> None:
        self._make = make

    def choose(self, query: Query, instances: Sequence[InstanceView]) -> PrefillOption | None:
        ranked = [(view.queued_s(), view.num_assigned, view.worker_id, view) for view in instances]
        if not ranked:
            return None
        queue_s, _, _, view = min(ranked, key=lambda entry: entry[:3])
        return self._make(query, view, queue_s)


class RoundRobin:
    """Chooses each worker in turn, by id."""

    def __init__(self, make: OptionMaker) -> None:
        self._make = make
        self._last_id = ""

    def choose(self, query: Query, instances: Sequence[InstanceView]) -> PrefillOption | None:
        if not instances:
            return None
        ordered = sorted(instances, key=lambda view: view.worker_id)
        after = [view for view in ordered if view.worker_id > self._last_id]
        view = (after or ordered)[0]
        self._last_id = view.worker_id
        return self._make(query, view, view.queued_s())


class RandomChoice:
    """Chooses any worker, drawn from the source of identifiers (so a seed repeats it)."""

    def __init__(self, make: OptionMaker, ids: IdSource) -> None:
        self._make = make
        self._ids = ids

    def choose(self, query: Query, instances: Sequence[InstanceView]) -> PrefillOption | None:
        if not instances:
            return None
        view = instances[self._ids.integer(32) % len(instances)]
        return self._make(query, view, view.queued_s())


def make_policy(config: SchedulerConfig, ids: IdSource) -> PrefillPolicy:
    """Return the policy that the configuration names."""
    make = option_maker(config)
    makers: dict[str, Callable[[], PrefillPolicy]] = {
        "kvcache-centric": lambda: LeastTtft(make),
        "local-cache-aware": lambda: LeastTtft(make),
        "load-balance": lambda: LoadBalance(make),
        "round-robin": lambda: RoundRobin(make),
        "random": lambda: RandomChoice(make, ids),
    }
    return makers[config.policy]()


def option_maker(config: SchedulerConfig) -> OptionMaker:
    """Return the maker of options, with fetches from other nodes or only from the own node."""
    if config.reads_remote:
        return OptionMaker(partial(all_ways, threshold=config.kvcache_balancing_threshold))
    return OptionMaker(local_ways)


Chain = tuple[StoreRun, ...]
"""Runs to fetch one after another; each begins where the one before stops."""
Ways = Callable[[Query, int, str], list[Chain]]
"""(prompt, leading blocks that a worker has itself, its node) -> what it may fetch after them: the
alternatives to compare, the first of which is to fetch nothing.
"""


def local_ways(query: Query, own: int, node_id: str) -> list[Chain]:
    """Return two ways: use what the worker has, or also fetch from its own node's pool."""
    return list(_parts(_local_chain(query, own, node_id)))


def all_ways(query: Query, own: int, node_id: str, threshold: float) -> list[Chain]:
    """Return these ways: recompute, or gather more or less of the prefix from the own node's pool
    and from others.

    Other nodes are asked only if that makes the prefix longer than `threshold` times the one in
    local memory.
    """
    local_chain = _local_chain(query, own, node_id)
    in_memory = takewhile(lambda run: not run.tier.is_below_dram, local_chain)
    here = max((run.stop for run in in_memory), default=own)
    ways = list(_parts(local_chain))

    def nearest(first: int) -> StoreRun | None:
        local = query.sources.local(first, node_id)
        if local is not None and not local.tier.is_below_dram:
            return local
        remote = next(iter(query.sources.longest(first)), None)
        if local is None or remote is None:
            return local or remote
        return local if local.local_s_per_block <= remote.remote_s_per_block else remote

    chains = [_chain(query, own, nearest)]
    if chains[0]:
        for run in query.sources.longest(own):
            if run != chains[0][0]:
                chains.append((run, *_chain(query, run.stop, nearest)))
    for chain in chains:
        for part in _parts(chain):
            if all(run.node_id == node_id for run in part):
                continue  # among the local ones already
            if min(part[-1].stop, query.wanted.max_cached_blocks) > threshold * here:
                ways.append(part)
    return ways


def _local_chain(query: Query, own: int, node_id: str) -> Chain:
    return _chain(query, own, lambda first: query.sources.local(first, node_id))


def _chain(query: Query, first: int, pick: Callable[[int], StoreRun | None]) -> Chain:
    """Return the runs that `pick` chooses one after another, from block `first` on."""
    runs: list[StoreRun] = []
    while first < query.wanted.max_cached_blocks and len(runs) < MAX_RUNS:
        run = pick(first)
        if run is None:
            break
        runs.append(run)
        first = run.stop
    return tuple(runs)


def _parts(chain: Chain) -> Iterator[Chain]:
    """Yield the chain cut after each run, from the empty chain to the whole one."""
    for count in range(len(chain) + 1):
        yield chain[:count]


def _option(query: Query, view: InstanceView, queue_s: float, chain: Chain) -> PrefillOption:
    """Return the option to fetch the runs of `chain` after the worker's own blocks."""
    have, fetch_s = query.own_blocks(view.worker_id), 0.0
    sources: list[BlockSource] = []
    for run in chain:
        stop = min(run.stop, query.wanted.max_cached_blocks)
        sources.append(run.source(stop))
        fetch_s += run.fetch_s(stop - have, local=run.node_id == view.hello.node_id)
        have = stop
    context = have * query.wanted.block_tokens
    num_new = query.wanted.num_tokens - context
    shape = num_new, context, view.hello.max_batched_tokens
    return PrefillOption(
        view=view,
        num_cached_blocks=have,
        num_new_tokens=num_new,
        sources=tuple(sources),
        queue_s=queue_s,
        fetch_s=fetch_s,
        compute_s=view.cost.prefill_s(*shape),
        tail_s=view.cost.tail_s(*shape),
        streams_s=view.streams_s(num_new),
    )


def rank(option: PrefillOption) -> tuple[float, int, str]:
    """Return the sort key of an option: the score, then the number of assigned requests, then the
    name, so that equal states lead to equal choices.
    """
    return option.score_s, option.view.num_assigned, option.view.worker_id


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOption:
    """One decode worker, and the consequences of joining its batch."""

    view: InstanceView
    tbt_s: float
    """Predicted gap between tokens with this request in the batch."""
    num_short_blocks: int
    """Blocks that are missing for the expected output; 0 = it fits."""
    push_s: float
    """Predicted seconds to push the blocks that the worker does not hold."""
    full: bool
    """True if not even the tokens so far fit now: the request would wait for room."""
    num_output_tokens: int

    @property
    def score_s(self) -> float:
        """The gap plus the push time spread over the expected output; the smallest is best."""
        return self.tbt_s + self.push_s / max(self.num_output_tokens, 1)


def evaluate(query: Query, view: InstanceView) -> DecodeOption:
    """Return what joining this worker means for the request and for those that run there."""
    wanted = query.wanted
    free = view.num_free_blocks()
    limit = view.hello.max_num_seqs
    sequences = view.num_sequences() + 1
    # The batch grows to the worker's limit at most; sequences above it wait.
    batch = min(sequences, limit) if limit else sequences
    context = view.num_context_tokens() + wanted.num_tokens
    missing = max(0, wanted.num_blocks_now - query.own_matches.get(view.worker_id, 0))
    return DecodeOption(
        view=view,
        tbt_s=view.cost.tbt_s(batch, round(context * batch / sequences)),
        num_short_blocks=max(0, wanted.num_blocks_expected - free),
        push_s=missing * wanted.push_s_per_block,
        num_output_tokens=wanted.num_output_tokens,
        full=wanted.num_blocks_now > free or (limit > 0 and sequences > limit),
    )


def choose_decode(query: Query, instances: Sequence[InstanceView]) -> DecodeOption | None:
    """Return the best worker: one with room before one without, then the smallest score.

    If all are full, it is the one that lacks the fewest blocks. Workers too small for the request
    even when empty are never chosen; None when there is no other.
    """
    options = [
        evaluate(query, view)
        for view in instances
        if view.hello.num_blocks >= query.wanted.num_blocks_now
    ]
    return min(options, key=decode_rank, default=None)


def decode_rank(option: DecodeOption) -> tuple[bool, int, float, int, str]:
    """Return the sort key of an option: see `choose_decode`."""
    short = option.num_short_blocks
    view = option.view
    return (
        option.full,
        short if option.full else short > 0,
        option.score_s,
        view.num_assigned,
        view.worker_id,
    )
