"""Whether prefill and decode have the workers they need: which worker is to change its role.

Pure; values and `now` in, at most one change out. What was seen of late tells how many workers each
role needs, and that what share of the requests would keep their limits with one worker more here
and one fewer there. A change is due when that share would clearly grow, for long, and when the
requests gained outweigh those that the change itself costs: a worker that changes serves nobody
meanwhile, and what it has not finished goes on elsewhere after a pause. Prefill for whose sake
nobody is refused needs no more workers, however busy it is; a pool that is to give keeps a margin,
as gaps between tokens near their limit are over it for a tenth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake.base import Role
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.views import InstanceView

FULL = 0.85
"""Decode with this load or more is short of workers: what joins next takes the rest."""
SPARE = 0.7
"""A pool can be brought to this load: above it queues and gaps run away with every burst."""
GAIN = 0.3
"""Of what a worker more can add to a pool, so much must come of it. Of the opposite change as much
would have to, so no worker is sent back for the loads it came for.
"""
HORIZON = 10.0
"""A change is taken to be of use for so many times as long as it was due."""
QUEUE_S = 5.0
"""Prompts that queue for so long are too many for the prefill pool, where no limit on the first
token says so by refusals.
"""
SLOWEST = 1.05
"""The slowest tenth of gaps, which the limit is on, for a mean one."""
IDLE_SHARE = 0.95
"""Of the limit on gaps: an idle worker's own gap counts as no more."""
MOST = 2.0
"""Loads count up to this: a burst, however large, is soon forgotten."""
REFUSING = 0.05
"""A pool for whose sake this share is refused is full, however low early rejection keeps its load.
"""
MOST_REFUSED = 0.9
"""Of those who came: more tells no better how many workers are missing."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests since the start."""

    offered: int
    """Who came, refused or not."""
    refused_prefill: int
    """For want of prefill; then of decode."""
    refused_decode: int


class _Seen(NamedTuple):
    """Averages over the last looks."""

    queue: float
    """Prompts queued, in shares of how long they may queue; 0 where a limit bounds that."""
    busy: float
    """Share of prefill workers that have something to compute."""
    decode: float
    offered_per_s: float
    refused_prefill_per_s: float
    refused_decode_per_s: float

    @property
    def refused(self) -> tuple[float, float]:
        """Share of the requests refused for want of prefill, and of decode."""
        offered = max(self.offered_per_s, 1e-9)
        prefill, decode = self.refused_prefill_per_s, self.refused_decode_per_s
        most = MOST_REFUSED / max(MOST_REFUSED, (prefill + decode) / offered)
        return most * prefill / offered, most * decode / offered

    def needs(self, num_prefills: int, num_decodes: int) -> tuple[float, float]:
        """Return how many workers of each role all requests would need, when so many have had to do
        with those that were let in.
        """
        prefill, decode = self.refused
        let_in = 1 - prefill - decode

        def need(count: int, load: float, refused: float) -> float:
            enough = min(1.0, load / SPARE) / let_in
            full = min(1.0, refused / REFUSING) / (1 - refused)
            return count * max(enough, full)

        prefills = need(num_prefills, self.busy, prefill)
        decodes = need(num_decodes, self.decode, decode)
        if self.queue >= 1:  # how long it is tells not how many are missing
            prefills = max(prefills, num_prefills + 1.0)
        return prefills, max(decodes, num_decodes * self.decode / FULL)

    def served(self, num_prefills: int, num_decodes: int, needs: tuple[float, float]) -> float:
        """Return the share of all requests that keep their limits with so many workers."""
        if not num_prefills or not num_decodes:
            return 0.0
        have = num_prefills, num_decodes
        return min(1.0, *(n / max(need, 1e-9) for n, need in zip(have, needs, strict=True)))


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One worker is to serve in the other role."""

    worker_id: str
    role: Role


class RoleBalance:
    """The loads of the two pools over time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._seen: _Seen | None = None
        self._weight = 0.0
        self._traffic = Traffic(0, 0, 0)
        self._looked_s: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def look(
        self, views: Sequence[InstanceView], traffic: Traffic, now: float
    ) -> RoleChange | None:
        """Take a look at all workers, and at who came and was refused so far; return what is to
        change, when it has been due for long.
        """
        prefills = [view for view in views if view.role is Role.PREFILL and not view.draining]
        decodes = [view for view in views if view.role is Role.DECODE and not view.draining]
        if not prefills or not decodes:
            self._traffic = traffic
            self.rest()
            return None
        self._average(prefills, decodes, traffic, now)
        wanted = self._due(prefills, decodes)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is None or now - self._wanted_since_s < self._config.role_switch_after_s:
            return None
        return RoleChange(_giver(prefills, decodes, wanted).worker_id, wanted)

    def rest(self) -> None:
        """Forget what was seen: the pools are about to be others, or have just become so."""
        self._wanted = self._looked_s = self._seen = None
        self._weight = 0.0

    def _due(
        self, prefills: Sequence[InstanceView], decodes: Sequence[InstanceView]
    ) -> Role | None:
        """Return the role that should have a worker more."""
        seen, num_prefills, num_decodes = self._seen, len(prefills), len(decodes)
        if seen is None:
            return None
        needs = seen.needs(num_prefills, num_decodes)
        served = seen.served(num_prefills, num_decodes, needs)
        for role, more in ((Role.PREFILL, 1), (Role.DECODE, -1)):
            then = seen.served(num_prefills + more, num_decodes - more, needs)
            receivers = num_prefills if more > 0 else num_decodes
            if then < served * (1 + GAIN / receivers):
                continue
            fewer = (num_prefills, num_decodes - 1) if more > 0 else (num_prefills - 1, num_decodes)
            meanwhile = seen.served(*fewer, needs)
            gained = (
                (then - served) * seen.offered_per_s * HORIZON * self._config.role_switch_after_s
            )
            lost = (served - meanwhile) * seen.offered_per_s * self._config.role_switch_drain_s
            if gained >= lost + _giver(prefills, decodes, role).load.num_running:
                return role
        return None

    def _average(
        self,
        prefills: Sequence[InstanceView],
        decodes: Sequence[InstanceView],
        traffic: Traffic,
        now: float,
    ) -> None:
        before, self._traffic = self._traffic, traffic
        if self._looked_s is not None and now > self._looked_s:
            passed_s, window_s = now - self._looked_s, self._config.role_switch_after_s
            seen = _Seen(
                queue=min(MOST, _mean([self._queue_load(view) for view in prefills])),
                busy=_mean([float(view.num_queued_tokens() > 0) for view in prefills]),
                decode=min(MOST, _mean([self._decode_load(view) for view in decodes])),
                offered_per_s=(traffic.offered - before.offered) / passed_s,
                refused_prefill_per_s=(traffic.refused_prefill - before.refused_prefill) / passed_s,
                refused_decode_per_s=(traffic.refused_decode - before.refused_decode) / passed_s,
            )
            self._weight = self._weight * math.exp(-passed_s / max(window_s, 1e-9)) + passed_s
            share = passed_s / self._weight  # all of it at first: nothing is averaged with nothing
            pairs = zip(self._seen or seen, seen, strict=True)
            self._seen = _Seen(*(a + share * (b - a) for a, b in pairs))
        self._looked_s = now

    def _queue_load(self, view: InstanceView) -> float:
        """Return how long prompts queue here, in shares of how long they may."""
        return view.queued_s() / QUEUE_S if self._config.ttft_slo_s is None else 0.0

    def _decode_load(self, view: InstanceView) -> float:
        """Return how full a decode worker's batch is: in memory, seats, or gaps between tokens, of
        which an idle worker's own are no load. Who is still being prefilled does not count.
        """
        hello, load = view.hello, view.load
        room = hello.num_blocks * hello.block_tokens
        share = load.num_context_tokens / room if room else 0.0
        if hello.max_num_seqs:
            share = max(share, load.num_running / hello.max_num_seqs)
        limit_s = self._config.tbt_slo_s
        if limit_s is not None and load.num_running:
            idle_s = min(SLOWEST * view.cost.tbt_s(1, 0), IDLE_SHARE * limit_s)
            gap_s = SLOWEST * view.cost.tbt_s(load.num_running, load.num_context_tokens)
            share = max(share, (gap_s - idle_s) / (limit_s - idle_s))
        return share


def _giver(
    prefills: Sequence[InstanceView], decodes: Sequence[InstanceView], wanted: Role
) -> InstanceView:
    """Return the worker that a change to this role would disturb least."""
    return min(decodes if wanted is Role.PREFILL else prefills, key=_in_use)


def _in_use(view: InstanceView) -> tuple[int, int, str]:
    """Return how much a change would disturb here."""
    return view.num_assigned, view.load.num_cached_blocks, view.worker_id


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
