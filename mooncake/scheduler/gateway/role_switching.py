"""Role changes. `RoleBalance` decides when a worker should change its role; `RoleSwitching` has it
drain, leave, and come back in the other role.

Owned by the gateway machine; the request manager moves the requests. Each message is repeated until
it takes effect; a worker that dies meanwhile is simply lost.

    decided ─► drained (no new work; after `role_switch_drain_s` the rest moves elsewhere)
                  └─► left ─► back with a new epoch, in the new role ─► the next may be decided

The balance is pure; values and `now` in, at most one change out. Recent averages give the number of
workers that each role needs, and from that the share of requests that would keep their limits with
one worker more here and one fewer there. A change is due when that share would clearly grow for
long, and when the requests gained outweigh those that the change itself costs: a worker that
changes serves no requests meanwhile, and those it has not finished continue elsewhere after a
pause. Prefill whose load leads to no refusals needs no more workers, however busy it is. A pool
that gives a worker away keeps a margin, because gaps between tokens near their limit exceed it for
a tenth of the time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake.base import Drain, Role, WorkerRef
from mooncake.rpc.channel import Channel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.admission import NO_ROOM_REASONS, OWN_LIMIT_REASONS
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.requests.request_manager import RequestManager
from mooncake.scheduler.scaling.policy import QUEUE_S, SLOWEST

FULL = 0.85
"""Decode with this load or more is short of workers: the requests that join next take the rest."""
SPARE = 0.7
"""A pool may be brought to this load; above it, queues and gaps grow with every burst."""
MIN_GAIN = 0.3
"""A change must gain at least this part of what one more worker can add to a pool. The opposite
change would have to gain as much, so no worker is sent back for the loads it came for.
"""
HORIZON = 10.0
"""A change is assumed to be useful for this many times `role_switch_after_s`."""
IDLE_SHARE = 0.95
"""An idle worker's own gap counts as at most this share of the limit on gaps."""
MOST = 2.0
"""Loads are capped at this, so that a burst of any size is soon forgotten."""
REFUSING = 0.05
"""A pool because of which this share of requests is refused counts as full, although early
rejection keeps its load low.
"""
MOST_REFUSED = 0.9
"""The cap on the share of refused requests; above it nothing more is learned from it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of requests since the start."""

    offered: int
    """Requests that arrived, refused or not."""
    refused_prefill: int
    """Refused because of prefill's load."""
    refused_decode: int
    """Refused because of decode's load."""


class _Averages(NamedTuple):
    """Recent averages."""

    queue: float
    """How long prompts queue, in shares of the time that they may queue; 0 if a limit bounds the
    queue.
    """
    busy: float
    """The share of prefill workers that have something to compute."""
    decode: float
    offered_per_s: float
    refused_prefill_per_s: float
    refused_decode_per_s: float

    @property
    def refused(self) -> tuple[float, float]:
        """Return the shares of requests refused because of prefill, and because of decode."""
        offered = max(self.offered_per_s, 1e-9)
        prefill, decode = self.refused_prefill_per_s, self.refused_decode_per_s
        most = MOST_REFUSED / max(MOST_REFUSED, (prefill + decode) / offered)
        return most * prefill / offered, most * decode / offered

    def needs(self, num_prefills: int, num_decodes: int) -> tuple[float, float]:
        """Return how many workers of each role all requests would need, given that `num_prefills`
        and `num_decodes` workers serve those that are accepted now.
        """
        prefill, decode = self.refused
        let_in = 1 - prefill - decode

        def need(count: int, load: float, refused: float) -> float:
            enough = min(1.0, load / SPARE) / let_in
            full = min(1.0, refused / REFUSING) / (1 - refused)
            return count * max(enough, full)

        prefills = need(num_prefills, self.busy, prefill)
        decodes = need(num_decodes, self.decode, decode)
        if self.queue >= 1:  # its length does not show how many workers are missing
            prefills = max(prefills, num_prefills + 1.0)
        return prefills, max(decodes, num_decodes * self.decode / FULL)

    def served(self, num_prefills: int, num_decodes: int, needs: tuple[float, float]) -> float:
        """Return the share of all requests that would keep their limits with this many workers."""
        if not num_prefills or not num_decodes:
            return 0.0
        have = num_prefills, num_decodes
        return min(1.0, *(n / max(need, 1e-9) for n, need in zip(have, needs, strict=True)))


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker and the role that it should change to."""

    worker_id: str
    role: Role


class RoleBalance:
    """Averages the loads of the two pools and says when a worker should change its role."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._averages: _Averages | None = None
        self._weight = 0.0
        self._traffic = Traffic(0, 0, 0)
        self._observed_s: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def observe(
        self, views: Sequence[InstanceView], traffic: Traffic, now: float
    ) -> RoleChange | None:
        """Update the averages from all workers and the traffic so far; return a change that has
        been due for long enough, or None.
        """
        prefills = [view for view in views if view.role is Role.PREFILL and not view.draining]
        decodes = [view for view in views if view.role is Role.DECODE and not view.draining]
        if not prefills or not decodes:
            self._traffic = traffic
            self.reset()
            return None
        self._average(prefills, decodes, traffic, now)
        wanted = self._wanted_role(prefills, decodes)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is None or now - self._wanted_since_s < self._config.role_switch_after_s:
            return None
        donor = _donor(prefills, decodes, wanted)
        return None if donor is None else RoleChange(donor.worker_id, wanted)

    def reset(self) -> None:
        """Drop the averages, because the pools are about to change or have just changed."""
        self._wanted = self._observed_s = self._averages = None
        self._weight = 0.0

    def _wanted_role(
        self, prefills: Sequence[InstanceView], decodes: Sequence[InstanceView]
    ) -> Role | None:
        """Return the role that should have one more worker, or None."""
        seen, num_prefills, num_decodes = self._averages, len(prefills), len(decodes)
        if seen is None:
            return None
        needs = seen.needs(num_prefills, num_decodes)
        served = seen.served(num_prefills, num_decodes, needs)
        for role, more in ((Role.PREFILL, 1), (Role.DECODE, -1)):
            then = seen.served(num_prefills + more, num_decodes - more, needs)
            receivers = num_prefills if more > 0 else num_decodes
            donor = _donor(prefills, decodes, role)
            if donor is None or then < served * (1 + MIN_GAIN / receivers):
                continue
            fewer = (num_prefills, num_decodes - 1) if more > 0 else (num_prefills - 1, num_decodes)
            meanwhile = seen.served(*fewer, needs)
            gained = (
                (then - served) * seen.offered_per_s * HORIZON * self._config.role_switch_after_s
            )
            lost = (served - meanwhile) * seen.offered_per_s * self._config.role_switch_drain_s
            if gained >= lost + donor.load.num_running:
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
        if self._observed_s is not None and now > self._observed_s:
            passed_s, window_s = now - self._observed_s, self._config.role_switch_after_s
            seen = _Averages(
                queue=min(MOST, _mean([self._queue_load(view) for view in prefills])),
                busy=_mean([float(view.num_queued_tokens() > 0) for view in prefills]),
                decode=min(MOST, _mean([self._decode_load(view) for view in decodes])),
                offered_per_s=(traffic.offered - before.offered) / passed_s,
                refused_prefill_per_s=(traffic.refused_prefill - before.refused_prefill) / passed_s,
                refused_decode_per_s=(traffic.refused_decode - before.refused_decode) / passed_s,
            )
            self._weight = self._weight * math.exp(-passed_s / max(window_s, 1e-9)) + passed_s
            share = passed_s / self._weight  # at first all of it: there is no older average
            pairs = zip(self._averages or seen, seen, strict=True)
            self._averages = _Averages(*(a + share * (b - a) for a, b in pairs))
        self._observed_s = now

    def _queue_load(self, view: InstanceView) -> float:
        """Return how long prompts queue here, as a share of the time that they may queue."""
        return view.queued_s() / QUEUE_S if self._config.ttft_slo_s is None else 0.0

    def _decode_load(self, view: InstanceView) -> float:
        """Return how full a decode worker's batch is: in memory, sequences, or gaps between tokens.
        An idle worker's own gap is no load. Requests that are still being prefilled do not count.
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


def _donor(
    prefills: Sequence[InstanceView], decodes: Sequence[InstanceView], wanted: Role
) -> InstanceView | None:
    """Return the worker that a change to this role would disturb least. Workers that share their
    experts keep their role. Return None if all of the other role share them.
    """
    pool = decodes if wanted is Role.PREFILL else prefills
    return min((view for view in pool if not view.hello.expert_group), key=_in_use, default=None)


def _in_use(view: InstanceView) -> tuple[int, int, str]:
    """Return a sort key: how much a change would disturb this worker."""
    return view.num_assigned, view.load.num_cached_blocks, view.worker_id


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


CHECK_S = 1.0
GIVE_UP_S = 300.0
"""A worker that has not come back after this time does not block other changes any more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    """A role change in progress."""

    worker: WorkerRef
    """The worker in its old epoch."""
    role: Role
    """The new role."""
    since_s: float


class RoleSwitching:
    """Carries out role changes, at most one at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        channel: Channel,
        membership: MembershipTable,
        conductor: Conductor,
        request_manager: RequestManager,
    ) -> None:
        self._config = config
        self._channel = channel
        self._membership = membership
        self._conductor = conductor
        self._request_manager = request_manager
        self._balance = RoleBalance(config)
        self._current: _Change | None = None
        self._next_s = float("-inf")

    def tick(self, now: float) -> float | None:
        """Check the balance, or continue the change in progress. Returns when to call again."""
        if self._current is None and not (self._config.role_switching and len(self._membership)):
            return None
        if now >= self._next_s:
            self._next_s = now + CHECK_S
            if self._current is not None:
                self._continue(self._current, now)
            else:
                change = self._balance.observe(self._conductor.views, self._traffic(), now)
                if change is not None:
                    self.start(change, now)
        return self._next_s

    def _traffic(self) -> Traffic:
        """Return the counts of requests. Those that only their own limits refused do not count:
        clients could move workers with them.
        """
        counts = self._request_manager.counters
        num_own = sum(counts[f"refused_{reason}"] for reason in OWN_LIMIT_REASONS)
        return Traffic(
            offered=counts["requests_accepted"] + counts["requests_refused"] - num_own,
            refused_prefill=counts["refused_ttft_limit"],
            refused_decode=sum(counts[f"refused_{reason}"] for reason in NO_ROOM_REASONS),
        )

    def start(self, change: RoleChange, now: float) -> bool:
        """Start a role change. Return False when another is in progress, there is no such worker,
        or it shares its experts.
        """
        member = self._membership.get(change.worker_id)
        if self._current is not None or member is None or member.hello.role is change.role:
            return False
        if member.hello.expert_group:
            return False
        self._next_s = now + CHECK_S
        logger.info("worker %s is to become %s", change.worker_id, change.role.value)
        self._current = _Change(member.hello.worker, change.role, now)
        self._conductor.on_draining(change.worker_id)
        self._continue(self._current, now)
        return True

    def _continue(self, change: _Change, now: float) -> None:
        worker, waited_s = change.worker, now - change.since_s
        member = self._membership.get(worker.worker_id)
        if self._membership.is_live(worker):
            self._channel.send(worker.address, Drain(next_role=change.role))
            if waited_s >= self._config.role_switch_drain_s:
                self._request_manager.move_requests_from(worker.worker_id, now)
        elif member is not None:
            if member.hello.role is change.role:
                self._request_manager.counters["roles_switched"] += 1
            self._end()
        elif waited_s >= GIVE_UP_S:
            self._end()

    def _end(self) -> None:
        self._current = None
        self._balance.reset()
