"""The choices of `prefill_choice` and `decode_choice` over columns: the same answers, for thousands
of workers in a fraction of a millisecond.

Pure. Workers that hold the same of a prompt have the same ways to get the rest of it, so ways are
found once for a group and their costs computed for all its members together, in the very order of
operations in which one option is computed (the sums are equal to the last bit). Groups whose lower
bound is above the best found are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake.kvstore.index import PrefixIndex
from mooncake.kvstore.survey import Survey
from mooncake.scheduler.cost import chunk_features
from mooncake.scheduler.decode_choice import DecodeOption, DecodeQuery, evaluate
from mooncake.scheduler.fleet import MANY_SLOTS, Bools, Column, Fleet, Floats, Ints, bits
from mooncake.scheduler.pools import Pools
from mooncake.scheduler.prefill_choice import (
    WORK_WEIGHT,
    Chain,
    OptionMaker,
    PrefillOption,
    PrefillQuery,
    Sources,
    StoreRun,
    rank,
)
from mooncake.scheduler.views import InstanceView

ROUNDING = 1e-9
"""Relative; a lower bound is lowered by this, since it is added up in another order."""
FEW = 3
"""So many alike are evaluated one by one."""
MAX_CODE_BITS = 40
Best = tuple[float, int, str]
"""What `prefill_choice.rank` returns."""


class Holdings(Mapping[str, int]):
    """Worker id -> leading blocks of one prompt that it has, or is computing."""

    def __init__(
        self, index: PrefixIndex, survey: Survey, among: int, inflight: Mapping[str, int]
    ) -> None:
        """`among`: bits of the workers that are of interest."""
        self._index = index
        self._survey = survey
        self._among = among
        self._inflight = inflight
        self._lengths: Ints | None = None

    @property
    def none(self) -> bool:
        """Nobody has anything."""
        region = self._survey.region(0)
        return not self._inflight and not (region.masks and region.masks[0] & self._among)

    @property
    def most(self) -> int:
        """Return the longest there is."""
        longest = next((stop for stop, _ in self._survey.runs(0, self._among)), 0)
        return max([longest, *self._inflight.values()])

    def of(self, fleet: Fleet) -> Ints:
        """Return the lengths of all workers of a fleet."""
        lengths = self._by_slot()[fleet.slots(self._index)]
        if self._inflight:
            lengths = lengths.copy()
            for worker_id, length in self._inflight.items():
                at = fleet.find(worker_id)
                if at < len(fleet) and fleet.views[at].worker_id == worker_id:
                    lengths[at] = max(lengths[at], length)
        return lengths

    def __getitem__(self, worker_id: str) -> int:
        slot = self._index.slot_of(worker_id)
        held = 0
        if slot is not None and self._among >> slot & 1:
            held = self._survey.run_of(0, 1 << slot)
        held = max(held, self._inflight.get(worker_id, 0))
        if not held:
            raise KeyError(worker_id)
        return held

    def __iter__(self) -> Iterator[str]:
        mask = next(iter(self._survey.region(0).masks), 0) & self._among
        for slot in np.flatnonzero(bits(mask, self._index.num_slots)):
            yield self._index.worker_at(int(slot)).worker_id
        for worker_id in self._inflight:
            slot_of = self._index.slot_of(worker_id)
            if slot_of is None or not mask >> slot_of & 1:
                yield worker_id

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _by_slot(self) -> Ints:
        if self._lengths is None:
            num_slots = self._index.num_slots
            self._lengths = np.zeros(num_slots + 8, np.int64)
            for stop, mask in self._survey.runs(0, self._among):
                self._lengths[: num_slots + 8][np.flatnonzero(bits(mask, num_slots))] = stop
        return self._lengths


def choose_decode_among(
    query: DecodeQuery, fleet: Fleet, usable: Bools, own: Ints
) -> DecodeOption | None:
    """Return what `decode_choice.choose_decode` does, for the usable workers of a fleet; `own` is
    what each has already of the prompt, in blocks.
    """
    columns = fleet.refresh()
    free, limit = columns[Column.FREE_BLOCKS], columns[Column.MAX_SEQS]
    sequences = columns[Column.SEQUENCES] + 1
    batch = np.where(limit > 0, np.minimum(sequences, limit), sequences)
    context = np.rint((columns[Column.CONTEXT] + query.num_tokens) * batch / sequences)
    gap_s = columns[Column.FIXED] + columns[Column.TOKEN] * batch
    gap_s = gap_s + columns[Column.PAIR] * context + columns[Column.SQUARE] * batch
    missing = np.maximum(0, query.num_blocks_now - own)
    push_s = missing * query.push_s_per_block
    score_s = gap_s + push_s / max(query.num_output_tokens, 1)
    full = (query.num_blocks_now > free) | ((limit > 0) & (sequences > limit))
    short = np.maximum(0, query.num_blocks_expected - free)
    members = np.flatnonzero(usable & (columns[Column.NUM_BLOCKS] >= query.num_blocks_now))
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
class Scene:
    """What one choice of a prefill worker is made from."""

    query: PrefillQuery
    fleet: Fleet
    members: Ints
    """Places in the fleet of the workers to choose from, ascending."""
    own: Ints
    """Of each member: leading blocks it has itself."""
    pool_slots: Ints
    """Of each member: its node's pool (see `Pools.slot_of_node`)."""
    survey: Survey


class _Noted:
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
    """`LeastTtft` for many workers."""

    def __init__(self, make: OptionMaker, pools: Pools, index: PrefixIndex) -> None:
        self._make = make
        self._pools = pools
        self._index = index

    def choose(
        self, query: PrefillQuery, fleet: Fleet, able: Bools, own: Ints, survey: Survey
    ) -> PrefillOption | None:
        """Return what `LeastTtft` does for the workers that are `able`; `own` is what each has of
        the prompt, in blocks.
        """
        members = np.flatnonzero(able)
        if not len(members):
            return None
        scene = Scene(
            query=query,
            fleet=fleet,
            members=members,
            own=np.minimum(own[members], query.max_cached_blocks),
            pool_slots=fleet.pool_slots(self._index, self._pools.slot_of_node)[members],
            survey=survey,
        )
        best: Best | None = None
        at = -1
        for bound, group in self._groups(scene):
            if best is not None and bound > best[0]:
                break
            found, place = self._best_of(scene, group)
            if best is None or found < best:
                best, at = found, place
        assert at >= 0
        return self._option(scene, at)

    def option(self, query: PrefillQuery, view: InstanceView) -> PrefillOption:
        """Return the quickest way for one worker to compute the prompt."""
        return self._make(query, view, view.queued_s())

    def _option(self, scene: Scene, at: int) -> PrefillOption:
        return self.option(scene.query, scene.fleet.views[scene.members[at]])

    # ------------------------------------------------------------ groups

    def _groups(self, scene: Scene) -> Iterator[tuple[float, Ints]]:
        """Yield (a lower bound of the scores, members) for members that hold the same, in order of
        the bounds.
        """
        held, lengths = self._held(scene)
        codes = _codes(scene.own, held)
        if codes is None:
            yield 0.0, np.arange(len(scene.members))
            return
        bounds = self._bounds(scene, held, lengths)
        order = np.argsort(codes, kind="stable")
        ordered = codes[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        stops = [*starts[1:], len(order)]
        least = np.minimum.reduceat(bounds[order], starts)
        for number in np.argsort(least, kind="stable"):
            yield float(least[number]), order[starts[number] : stops[number]]

    def _held(self, scene: Scene) -> tuple[Bools, Floats]:
        """Return (stretch x member: whether the member's own pool holds it, blocks of each
        stretch).
        """
        region, pools = scene.survey.region(0), self._pools.mask
        limit = scene.query.max_cached_blocks
        rows, lengths = [], []
        present = scene.pool_slots >= 0
        for stretch, mask in enumerate(region.masks):
            start = region.start(stretch)
            if mask & pools and start < limit:
                rows.append(bits(mask & pools, self._index.num_slots)[scene.pool_slots] & present)
                lengths.append(min(region.stops[stretch], limit) - start)
        shape = (len(rows), len(scene.members))
        return np.array(rows, np.bool_).reshape(shape), np.array(lengths, np.float64)

    def _bounds(self, scene: Scene, held: Bools, lengths: Floats) -> Floats:
        """Return a lower bound of each member's score: every block after its own costs the least
        of a local fetch (no more of them than its pool holds), a remote one, and its tokens.
        """
        query, columns = scene.query, scene.fleet.columns[:, scene.members]
        limit = query.max_cached_blocks
        end = min(scene.survey.region(0).end, limit)
        reach = np.where(scene.own > end, limit, end)
        num_blocks = np.maximum(reach - scene.own, 0)
        num_local = np.minimum(lengths @ held, num_blocks)
        token_s = columns[Column.TOKEN]
        block_s = token_s * query.block_tokens
        local_s, remote_s = self._pools.cheapest_block_s()
        rest = query.num_tokens - (scene.own + num_blocks) * query.block_tokens
        work_s = columns[Column.FIXED] + token_s * rest
        work_s += num_local * np.minimum(block_s, min(local_s, remote_s))
        work_s += (num_blocks - num_local) * np.minimum(block_s, remote_s)
        bounds = columns[Column.QUEUE_S] + (1 + WORK_WEIGHT) * work_s
        return np.asarray(bounds * (1 - ROUNDING))

    # ------------------------------------------------------------ one group

    def _best_of(self, scene: Scene, group: Ints) -> tuple[Best, int]:
        """Return the best rank of a group and whose it is (a place among the members)."""
        best: Best | None = None
        at = -1
        apart = self._apart(scene, group)
        while not apart.all():
            first = int(np.argmin(apart))
            chains, named, node_id = self._ways_of(scene, int(group[first]))
            # A pool that others are told to fetch from is local to its own node: a way of its own.
            apart |= np.isin(scene.pool_slots[group], named)
            if not apart[first]:
                best, at = self._evaluate(scene, group[~apart], chains, node_id)
                break
        for place in group[apart]:
            found = rank(self._option(scene, int(place)))
            if best is None or found < best:
                best, at = found, int(place)
        assert best is not None
        return best, at

    def _apart(self, scene: Scene, group: Ints) -> Bools:
        """Return which members are evaluated one by one from the start: all where there are few,
        or where they are ahead of what groups are told apart by and somebody holds what follows.
        """
        own = int(scene.own[group[0]])
        ahead = own > scene.survey.region(0).end and bool(scene.survey.region(own).stops)
        if ahead or len(group) < FEW:
            return np.ones(len(group), np.bool_)
        return np.asarray(scene.pool_slots[group] == MANY_SLOTS)

    def _ways_of(self, scene: Scene, place: int) -> tuple[Sequence[Chain], list[int], str]:
        """Return a member's ways, the bits of the pools named on the way there, and its node."""
        sources = _Noted(scene.query.sources)
        view = scene.fleet.views[scene.members[place]]
        query = replace(scene.query, sources=sources)
        chains = self._make.ways(query, int(scene.own[place]), view.hello.node_id)
        slots = map(self._index.slot_of, sources.named)
        return chains, [slot for slot in slots if slot is not None], view.hello.node_id

    def _evaluate(
        self, scene: Scene, group: Ints, chains: Sequence[Chain], node_id: str
    ) -> tuple[Best, int]:
        """Return the best rank over `chains` for members alike; `chains` are as seen from the node
        `node_id`, whose own pool stands for each member's own.
        """
        query, own = scene.query, int(scene.own[group[0]])
        columns = scene.fleet.columns[:, scene.members[group]]
        queue_s = columns[Column.QUEUE_S]
        local_fixed_s: Floats | None = None
        score_s: Floats | None = None
        for chain in chains:
            have, fetch_s = own, np.zeros(1)
            for run in chain:
                stop = min(run.stop, query.max_cached_blocks)
                if run.node_id == node_id:
                    if local_fixed_s is None:
                        local_fixed_s = self._pools.local_fixed_s(scene.pool_slots[group])
                    fetch_s = fetch_s + (local_fixed_s + (stop - have) * run.local_s_per_block)
                else:
                    fetch_s = fetch_s + run.fetch_s(stop - have, local=False)
                have = stop
            context = have * query.block_tokens
            compute_s = prefill_s(columns, query.num_tokens - context, context)
            ttft_s = queue_s + fetch_s + compute_s
            way_s = ttft_s + WORK_WEIGHT * (fetch_s + compute_s)
            score_s = way_s if score_s is None else np.minimum(score_s, way_s)
        assert score_s is not None
        least = score_s.min()
        equals = np.flatnonzero(score_s == least)
        assigned = columns[Column.ASSIGNED][equals]
        at = int(equals[np.argmin(assigned)])
        place = int(group[at])
        name = scene.fleet.views[scene.members[place]].worker_id
        return (float(least), int(columns[Column.ASSIGNED][at]), name), place


def prefill_s(columns: Floats, num_new_tokens: int, num_context_tokens: int) -> Floats:
    """Return `StepCostModel.prefill_s` of many workers at once."""
    chunks = columns[Column.CHUNK]
    if len(chunks) and chunks[0] == chunks[-1] and (chunks == chunks[0]).all():
        return _prefill_s(columns, num_new_tokens, num_context_tokens, int(chunks[0]))
    seconds = np.zeros(len(chunks))
    for chunk in np.unique(chunks):
        some = chunks == chunk
        seconds[some] = _prefill_s(columns[:, some], num_new_tokens, num_context_tokens, int(chunk))
    return seconds


def _prefill_s(columns: Floats, num_new: int, num_context: int, chunk_tokens: int) -> Floats:
    steps, pairs, squares = chunk_features(num_new, num_context, chunk_tokens)
    return np.asarray(
        columns[Column.FIXED] * steps
        + columns[Column.TOKEN] * num_new
        + columns[Column.PAIR] * pairs
        + columns[Column.SQUARE] * squares
    )


def _codes(own: Ints, held: Bools) -> Ints | None:
    """Return a number for each member, the same for those that hold the same; None when all do."""
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
