"""Which two workers serve a request: one for its prompt, one for its tokens, or one for both.

Owned by the Conductor. Few workers are compared view by view, many by columns, with the same result
(`tests/unit/scheduler/test_fleet_choice.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mooncake.kvstore.survey import Survey
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.decode_choice import DecodeOption, DecodeQuery, choose_decode, evaluate
from mooncake.scheduler.fleet import Column, Fleet
from mooncake.scheduler.fleet_choice import FleetSearch, Holdings, choose_decode_among
from mooncake.scheduler.prefill_choice import (
    LeastTtft,
    PrefillOption,
    PrefillPolicy,
    PrefillQuery,
)
from mooncake.scheduler.views import InstanceView

COLUMNS_FROM = 24
"""From so many workers of a role on they are compared by columns: it is quicker then."""
Pair = tuple[PrefillOption, DecodeOption]


@dataclass(frozen=True, slots=True)
class Ask:
    """What one choice is made from."""

    prefill: PrefillQuery
    decode: DecodeQuery
    held: Holdings
    survey: Survey
    exclude: Collection[str]
    """Workers to be used only when there is no other."""
    tbt_slo_s: float | None


class PairChoice:
    """See the module."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: PrefillPolicy,
        prefills: Fleet,
        decodes: Fleet,
        search: FleetSearch,
        *,
        columns_from: int = COLUMNS_FROM,
    ) -> None:
        self._whole_tokens = config.whole_on_decode_max_tokens
        self._policy = policy
        self._prefills = prefills
        self._decodes = decodes
        self._search = search
        self._columns_from = columns_from

    def choose(self, ask: Ask) -> Pair | None:
        """Return who computes the prompt and who decodes (the same view = whole on decode); None
        when the request is too large for all of them.
        """
        if all(view.draining for view in self._prefills.views):
            return self._choose_whole(ask)
        decode = self._choose_decode(ask)
        prefill = self._choose_prefill(ask)
        if decode is None or prefill is None:
            return None
        if self._whole_tokens:
            whole = self._choose_whole(ask)
            if whole is not None and self._whole_is_better(whole, prefill, ask.tbt_slo_s):
                return whole
        return prefill, decode

    def _choose_decode(self, ask: Ask) -> DecodeOption | None:
        fleet = self._decodes
        if len(fleet) < self._columns_from:
            return choose_decode(ask.decode, _usable(fleet, ask.exclude))
        own = ask.held.of(fleet)
        return choose_decode_among(ask.decode, fleet, fleet.usable(ask.exclude), own)

    def _choose_prefill(self, ask: Ask) -> PrefillOption | None:
        fleet = self._prefills
        num_blocks = -(-ask.prefill.num_tokens // ask.prefill.block_tokens)
        if len(fleet) < self._columns_from or not isinstance(self._policy, LeastTtft):
            views = _usable(fleet, ask.exclude)
            able = [view for view in views if view.hello.num_blocks >= num_blocks]
            return self._policy.choose(ask.prefill, able)
        usable = fleet.usable(ask.exclude)
        fits = fleet.columns[Column.NUM_BLOCKS] >= num_blocks
        own = ask.held.of(fleet)
        return self._search.choose(ask.prefill, fleet, usable & fits, own, ask.survey)

    def _choose_whole(self, ask: Ask) -> Pair | None:
        """Return the decode worker that does a whole request soonest, those with room first."""
        pairs = [
            (self._search.option(ask.prefill, view), evaluate(ask.decode, view))
            for view in _usable(self._decodes, ask.exclude)
            if view.hello.num_blocks >= ask.decode.num_blocks_now
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

    def _whole_is_better(self, whole: Pair, split: PrefillOption, limit_s: float | None) -> bool:
        """Whether a short prompt should run on its decode worker: sooner there, there is room, and
        the batch it delays stays inside the limit on gaps.
        """
        option, decode = whole
        if option.num_new_tokens > self._whole_tokens or decode.full:
            return False
        gap_s = decode.tbt_s + option.compute_s
        return option.ttft_s <= split.ttft_s and (limit_s is None or gap_s <= limit_s)


def _usable(fleet: Fleet, exclude: Collection[str]) -> list[InstanceView]:
    """Return the workers that take work, excluded ones only for want of others."""
    views = [view for view in fleet.views if not view.draining]
    return [view for view in views if view.worker_id not in exclude] or views
