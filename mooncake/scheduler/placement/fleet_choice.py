"""The choices of `worker_choice` over columns: the same results for thousands
of workers, in a fraction of a millisecond.

Pure. Workers that hold the same blocks of a prompt, and whose pools hold the same in the same
tiers, have the same ways to get the others. So the ways are found once for each group, and their
costs are computed for all members together. The order of operations is the same as for one option,
so the sums are equal to the last bit. A group whose lower bound is above the best score found is
skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake.base import Tier
from mooncake.engine.cost import chunk_features
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch
from mooncake.scheduler.placement.pools import Pools
from mooncake.scheduler.placement.views import (
    MANY_SLOTS,
    Bools,
    Column,
    Fleet,
    Floats,
    InstanceView,
    Ints,
    bits,
)
from mooncake.scheduler.placement.worker_choice import (
    WORK_WEIGHT,
    Chain,
    DecodeOption,
    OptionMaker,
    PrefillOption,
    Query,
    Sources,
    StoreRun,
    evaluate,
    rank,
)

ROUNDING = 1e-9
"""Relative amount by which lower bounds are reduced, because they are summed in another order."""
FEW = 3
"""Groups of fewer members than this are evaluated one by one."""
MAX_CODE_BITS = 40
Best = tuple[float, int, str]
"""The result of `worker_choice.rank`."""


def choose_decode_among(
    query: Query, fleet: Fleet, usable: Bools, own: Ints
) -> DecodeOption | None:
    """Return the result of `worker_choice.choose_decode` for the usable workers of a fleet. `own`:
    the blocks of the prompt that each worker holds.
    """
    wanted, columns = query.wanted, fleet.refresh()
    free, limit = columns[Column.FREE_BLOCKS], columns[Column.MAX_SEQS]
    sequences = columns[Column.SEQUENCES] + 1
    batch = np.where(limit > 0, np.minimum(sequences, limit), sequences)
    context = np.rint((columns[Column.CONTEXT] + wanted.num_tokens) * batch / sequences)
    stages = columns[Column.STAGES]
    each, share = np.ceil(batch / stages), np.rint(context / stages)
    gap_s = columns[Column.STREAM_FIXED] + columns[Column.STREAM] * each
    gap_s = stages * (gap_s + columns[Column.STREAM_READ] * share)
    missing = np.maximum(0, wanted.num_blocks_now - own)
    push_s = missing * wanted.push_s_per_block
    score_s = gap_s + push_s / max(wanted.num_output_tokens, 1)
    full = (wanted.num_blocks_now > free) | ((limit > 0) & (sequences > limit))
    short = np.maximum(0, wanted.num_blocks_expected - free)
    members = np.flatnonzero(usable & (columns[Column.NUM_BLOCKS] >= wanted.num_blocks_now))
    if not len(members):
        return None
    with_room = members[~full[members]]
    if len(with_room):
        members = with_room
        short = short > 0
    for key in (short, score_s, columns[Column.ASSIGNED]):
        values = key[members]
        members = members[values == values.min()]
    return evaluate(query, fleet.views[members[0]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The facts from which one prefill worker is chosen."""

    query: Query
    fleet: Fleet
    members: Ints
    """Positions in the fleet of the workers to choose from, ascending."""
    own: Ints
    """The number of leading blocks that each member holds itself."""
    pool_slots: Ints
    """The pool of each member's node (see `Pools.slot_of_node`)."""
    prefix_match: PrefixMatch


class _RecordingSources:
    """`Sources` that remember which pools they named."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.named: dict[str, None] = {}

    def longest(self, first: int) -> Sequence[StoreRun]:
        runs = self._sources.longest(first)
        self.named.update(dict.fromkeys(run.store.worker_id for run in runs))
        return runs

    def local(self, first: int, node_id: str) -> StoreRun | None:
        return self._sources.local(first, node_id)


class FleetSearch:
    """Applies the policy `LeastTtft` to many workers at once."""

    def __init__(self, make: OptionMaker, pools: Pools, index: PrefixIndex) -> None:
        self._make = make
        self._pools = pools
        self._index = index

    def choose(
        self, query: Query, fleet: Fleet, able: Bools, own: Ints, prefix_match: PrefixMatch
    ) -> PrefillOption | None:
        """Return the result of `LeastTtft` for the workers that are `able`. `own`: the blocks of
        the prompt that each worker holds.
        """
        members = np.flatnonzero(able)
        if not len(members):
            return None
        candidates = Candidates(
            query=query,
            fleet=fleet,
            members=members,
            own=np.minimum(own[members], query.wanted.max_cached_blocks),
            pool_slots=fleet.pool_slots(self._index, self._pools.slot_of_node)[members],
            prefix_match=prefix_match,
        )
        best: Best | None = None
        at = -1
        for bound, group in self._groups(candidates):
            if best is not None and bound > best[0]:
                break
            found, place = self._best_of(candidates, group)
            if best is None or found < best:
                best, at = found, place
        assert at >= 0
        return self._option(candidates, at)

    def option(self, query: Query, view: InstanceView) -> PrefillOption:
        """Return the fastest way for one worker to compute the prompt."""
        return self._make(query, view, view.queued_s())

    def _option(self, candidates: Candidates, at: int) -> PrefillOption:
        return self.option(candidates.query, candidates.fleet.views[candidates.members[at]])

    # ------------------------------------------------------------ groups

    def _groups(self, candidates: Candidates) -> Iterator[tuple[float, Ints]]:
        """Yield (lower bound of the scores, members) for each group of members that hold the same
        blocks, the smallest bound first.
        """
        held, lengths = self._held(candidates)
        codes = _codes(candidates.own, held)
        if codes is None:
            yield 0.0, np.arange(len(candidates.members))
            return
        bounds = self._bounds(candidates, held, lengths)
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        stops = [*starts[1:], len(order)]
        least = np.minimum.reduceat(bounds[order], starts)
        for number in np.argsort(least, kind="stable"):
            yield float(least[number]), order[starts[number] : stops[number]]

    def _held(self, candidates: Candidates) -> tuple[Bools, Floats]:
        """Return (stretch in a tier x member: whether the pool of the member's node has the stretch
        there and no nearer, blocks of each stretch).
        """
        region, pools = candidates.prefix_match.region(0), self._pools
        limit = candidates.query.wanted.max_cached_blocks
        rows, lengths = [], []
        tiers = []
        for tier, tier_mask in pools.tier_masks.items():
            slots = pools.slots_in(tier, candidates.pool_slots)
            tiers.append((tier_mask, slots, slots >= 0))
        for stretch, mask in enumerate(region.masks):
            start = region.start(stretch)
            if start >= limit:
                break
            for tier_mask, slots, present in tiers:
                if mask & tier_mask:
                    rows.append(bits(mask & tier_mask, self._index.num_slots)[slots] & present)
                    lengths.append(min(region.stops[stretch], limit) - start)
        shape = (len(rows), len(candidates.members))
        return np.array(rows, np.bool_).reshape(shape), np.array(lengths, np.float64)

    def _bounds(self, candidates: Candidates, held: Bools, lengths: Floats) -> Floats:
        """Return a lower bound of each member's score. Every block after its own costs at least the
        cheapest of three: a local fetch (of no more blocks than its pool holds), a remote fetch,
        and computing it.
        """
        query, columns = candidates.query, candidates.fleet.columns[:, candidates.members]
        limit = query.wanted.max_cached_blocks
        end = min(candidates.prefix_match.region(0).end, limit)
        reach = np.where(candidates.own > end, limit, end)
        num_blocks = np.maximum(reach - candidates.own, 0)
        num_local = np.minimum(lengths @ held, num_blocks)
        token_s = columns[Column.TOKEN]
        block_s = token_s * query.wanted.block_tokens
        local_s, remote_s = self._pools.cheapest_block_s()
        rest = query.wanted.num_tokens - (candidates.own + num_blocks) * query.wanted.block_tokens
        work_s = columns[Column.FIXED] + token_s * rest
        work_s += num_local * np.minimum(block_s, min(local_s, remote_s))
        work_s += (num_blocks - num_local) * np.minimum(block_s, remote_s)
        bounds = columns[Column.QUEUE_S] + (1 + WORK_WEIGHT) * work_s
        return np.asarray(bounds * (1 - ROUNDING))

    # ------------------------------------------------------------ one group

    def _best_of(self, candidates: Candidates, group: Ints) -> tuple[Best, int]:
        """Return the best rank within a group and the member that has it."""
        best: Best | None = None
        at = -1
        alone = self._evaluated_alone(candidates, group)
        while not alone.all():
            first = int(np.argmin(alone))
            chains, named, node_id = self._ways_of(candidates, int(group[first]))
            # A pool named here is local to the members of its own node: these have other ways.
            alone |= np.isin(candidates.pool_slots[group], named)
            if not alone[first]:
                best, at = self._evaluate(candidates, group[~alone], chains, node_id)
                break
        for place in group[alone]:
            found = rank(self._option(candidates, int(place)))
            if best is None or found < best:
                best, at = found, int(place)
        assert best is not None
        return best, at

    def _evaluated_alone(self, candidates: Candidates, group: Ints) -> Bools:
        """Return which members of a group must be evaluated one by one: all members of small
        groups, and those that hold more of the prompt than groups are distinguished by.
        """
        own = int(candidates.own[group[0]])
        ahead = own > candidates.prefix_match.region(0).end and bool(
            candidates.prefix_match.region(own).stops
        )
        if ahead or len(group) < FEW:
            return np.ones(len(group), np.bool_)
        return np.asarray(candidates.pool_slots[group] == MANY_SLOTS)

    def _ways_of(
        self, candidates: Candidates, place: int
    ) -> tuple[Sequence[Chain], list[int], str]:
        """Return a member's ways, the bits of the pools that were named for them, and its node."""
        sources = _RecordingSources(candidates.query.sources)
        view = candidates.fleet.views[candidates.members[place]]
        query = replace(candidates.query, sources=sources)
        chains = self._make.ways(query, int(candidates.own[place]), view.hello.node_id)
        slots = map(self._index.slot_of, sources.named)
        return chains, [slot for slot in slots if slot is not None], view.hello.node_id

    def _evaluate(
        self, candidates: Candidates, group: Ints, chains: Sequence[Chain], node_id: str
    ) -> tuple[Best, int]:
        """Return the best rank over `chains` for members that hold the same blocks. `chains` are as
        seen from node `node_id`; its pool stands for the pool of each member's own node.
        """
        query, own = candidates.query, int(candidates.own[group[0]])
        columns = candidates.fleet.columns[:, candidates.members[group]]
        queue_s = columns[Column.QUEUE_S]
        local_fixed_s: dict[Tier, Floats] = {}
        score_s: Floats | None = None
        for chain in chains:
            have, fetch_s = own, np.zeros(1)
            for run in chain:
                stop = min(run.stop, query.wanted.max_cached_blocks)
                if run.node_id == node_id:
                    if run.tier not in local_fixed_s:
                        slots = candidates.pool_slots[group]
                        local_fixed_s[run.tier] = self._pools.local_fixed_s(run.tier, slots)
                    run_s = (stop - have) * run.local_s_per_block
                    fetch_s = fetch_s + (local_fixed_s[run.tier] + run_s)
                else:
                    fetch_s = fetch_s + run.fetch_s(stop - have, local=False)
                have = stop
            context = have * query.wanted.block_tokens
            num_new = query.wanted.num_tokens - context
            compute_s = prefill_s(columns, num_new, context)
            ttft_s = queue_s + fetch_s + compute_s + tail_s(columns, num_new, context)
            way_s = ttft_s + WORK_WEIGHT * (fetch_s + compute_s)
            score_s = way_s if score_s is None else np.minimum(score_s, way_s)
        assert score_s is not None
        least = score_s.min()
        equals = np.flatnonzero(score_s == least)
        assigned = columns[Column.ASSIGNED][equals]
        at = int(equals[np.argmin(assigned)])
        place = int(group[at])
        name = candidates.fleet.views[candidates.members[place]].worker_id
        return (float(least), int(columns[Column.ASSIGNED][at]), name), place


def prefill_s(columns: Floats, num_new_tokens: int, num_context_tokens: int) -> Floats:
    """Return `StepCostModel.prefill_s` for many workers at once."""
    chunks = columns[Column.CHUNK]
    if len(chunks) and chunks[0] == chunks[-1] and (chunks == chunks[0]).all():
        return _prefill_s(columns, num_new_tokens, num_context_tokens, int(chunks[0]))
    seconds = np.zeros(len(chunks))
    for chunk in np.unique(chunks):
        some = chunks == chunk
        seconds[some] = _prefill_s(columns[:, some], num_new_tokens, num_context_tokens, int(chunk))
    return seconds


def tail_s(columns: Floats, num_new_tokens: int, num_context_tokens: int) -> Floats:
    """Return `StepCostModel.tail_s` for many workers at once."""
    stages, chunks = columns[Column.STAGES], columns[Column.CHUNK]
    if (stages == 1).all():
        return np.zeros(1)
    chunk = np.where(chunks > 0, np.minimum(chunks, num_new_tokens), num_new_tokens)
    rest = num_new_tokens % chunk
    last = np.where(rest > 0, rest, chunk)
    before = num_context_tokens + num_new_tokens - last
    step_s = columns[Column.FIXED] + columns[Column.TOKEN] * last
    step_s = step_s + columns[Column.PAIR] * last * before + columns[Column.SQUARE] * last * last
    step_s = step_s + columns[Column.READ] * before
    return np.asarray((stages - 1) * step_s)


def _prefill_s(columns: Floats, num_new: int, num_context: int, chunk_tokens: int) -> Floats:
    steps, pairs, squares, read = chunk_features(num_new, num_context, chunk_tokens)
    return np.asarray(
        columns[Column.FIXED] * steps
        + columns[Column.TOKEN] * num_new
        + columns[Column.PAIR] * pairs
        + columns[Column.SQUARE] * squares
        + columns[Column.READ] * read
    )


def _codes(own: Ints, held: Bools) -> Ints | None:
    """Return a number for each member, equal for members that hold the same blocks, or None if all
    members hold the same blocks.
    """
    if not len(held) and (own == own[0]).all():
        return None
    if len(held) <= MAX_CODE_BITS:
        codes = own << len(held)
        for number, row in enumerate(held):
            codes = codes + (row.astype(np.int64) << number)
        return codes
    packed = np.packbits(held, axis=0)
    table = np.concatenate((packed, own.astype(">u4").view(np.uint8).reshape(-1, 4).T))
    rows = np.ascontiguousarray(table.T)
    _, codes = np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_inverse=True)
    return np.asarray(codes, np.int64)
