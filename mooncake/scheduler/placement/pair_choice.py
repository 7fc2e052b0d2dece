"""The choice of the two workers of a request: one for the prompt and one for decoding, or one
worker for both.

Owned by the Conductor. Few workers are compared view by view, many by columns, with the same result
(`tests/unit/scheduler/placement/test_fleet_choice.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch
from mooncake.scheduler.placement.fleet_choice import FleetSearch, choose_decode_among
from mooncake.scheduler.placement.pools import Pools, PoolSources
from mooncake.scheduler.placement.views import Column, Fleet, InstanceView, PrefixLengths
from mooncake.scheduler.placement.worker_choice import (
    DecodeOption,
    LeastTtft,
    PrefillOption,
    PrefillPolicy,
    Query,
    Wanted,
    choose_decode,
    evaluate,
)

COLUMNS_FROM = 8
"""With this many workers of a role or more, comparing them by columns is faster."""
Pair = tuple[PrefillOption, DecodeOption]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairQuery(Query):
    """The facts from which a pair is chosen."""

    own_matches: PrefixLengths
    sources: PoolSources
    prefix_match: PrefixMatch

    @classmethod
    def of(
        cls,
        wanted: Wanted,
        index: PrefixIndex,
        pools: Pools,
        prefix_match: PrefixMatch,
        inflight: Mapping[str, int],
    ) -> PairQuery:
        """Return the query of a request whose blocks have these holders. `inflight`: worker id ->
        leading blocks that it is computing.
        """
        return cls(
            wanted=wanted,
            own_matches=PrefixLengths(index, prefix_match, ~pools.node_mask, inflight),
            sources=PoolSources(pools, prefix_match),
            prefix_match=prefix_match,
        )


class PairChoice:
    """Chooses pairs from two fleets."""

    def __init__(
        self,
        policy: PrefillPolicy,
        prefills: Fleet,
        decodes: Fleet,
        search: FleetSearch,
        *,
        columns_from: int,
    ) -> None:
        self._policy = policy
        self._prefills = prefills
        self._decodes = decodes
        self._search = search
        self._columns_from = columns_from

    def choose(self, query: PairQuery) -> Pair | None:
        """Return the options for the prompt and for decoding; if both are the same view, the
        request runs whole on decode. None when the request is too large for all workers.
        """
        if not len(self._prefills):
            return self._choose_alone(query)
        decode = self._choose_decode(query)
        prefill = self._choose_prefill(query)
        if decode is None or prefill is None:
            return None
        if query.wanted.max_whole_tokens:
            whole = self._choose_whole(query)
            if whole is not None and _whole_is_better(whole, prefill, query):
                return whole
        return prefill, decode

    def _choose_decode(self, query: PairQuery) -> DecodeOption | None:
        fleet = self._decodes
        if len(fleet) < self._columns_from:
            return choose_decode(query, usable_views(fleet, query.wanted.exclude))
        own = query.own_matches.in_fleet(fleet)
        return choose_decode_among(query, fleet, fleet.usable(query.wanted.exclude), own)

    def _choose_prefill(self, query: PairQuery) -> PrefillOption | None:
        fleet = self._prefills
        num_blocks = -(-query.wanted.num_tokens // query.wanted.block_tokens)
        if len(fleet) < self._columns_from or not isinstance(self._policy, LeastTtft):
            views = usable_views(fleet, query.wanted.exclude)
            able = [view for view in views if view.hello.num_blocks >= num_blocks]
            return self._policy.choose(query, able)
        usable = fleet.usable(query.wanted.exclude)
        fits = fleet.columns[Column.NUM_BLOCKS] >= num_blocks
        own = query.own_matches.in_fleet(fleet)
        return self._search.choose(query, fleet, usable & fits, own, query.prefix_match)

    def _choose_alone(self, query: PairQuery) -> Pair | None:
        """Return the decode worker for a whole request where there are no prefill workers. A policy
        that does not look for the least time to the first token chooses in its own way here, too.
        """
        if isinstance(self._policy, LeastTtft):
            return self._choose_whole(query)
        option = self._policy.choose(query, self._able_decodes(query))
        return None if option is None else (option, evaluate(query, option.view))

    def _able_decodes(self, query: PairQuery) -> list[InstanceView]:
        return [
            view
            for view in usable_views(self._decodes, query.wanted.exclude)
            if view.hello.num_blocks >= query.wanted.num_blocks_now
        ]

    def _choose_whole(self, query: PairQuery) -> Pair | None:
        """Return the decode worker that finishes the whole request first; workers with room come
        first.
        """
        pairs = [
            (self._search.option(query, view), evaluate(query, view))
            for view in self._able_decodes(query)
        ]
        return min(
            pairs,
            key=lambda pair: (
                pair[1].full,
                pair[0].ttft_s,
                pair[1].tbt_s,
                pair[0].view.num_assigned,
                pair[0].view.worker_id,
            ),
            default=None,
        )


def _whole_is_better(whole: Pair, split: PrefillOption, query: PairQuery) -> bool:
    """Return whether a request of few new tokens should run on its decode worker. That worker must
    be faster and have room, and the batch that it delays must stay within the limit on gaps.
    """
    option, decode = whole
    if option.num_new_tokens > query.wanted.max_whole_tokens or decode.full:
        return False
    gap_s, limit_s = decode.tbt_s + option.compute_s, query.wanted.tbt_slo_s
    return option.ttft_s <= split.ttft_s and (limit_s is None or gap_s <= limit_s)


def usable_views(fleet: Fleet, exclude: Collection[str]) -> list[InstanceView]:
    """Return the workers that may get work. Excluded ones are used only when there is no other, and
    draining ones only after those.
    """
    views = [view for view in fleet.views if not view.draining] or fleet.views
    return [view for view in views if view.worker_id not in exclude] or views
