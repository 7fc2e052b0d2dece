"""Role changes: a worker drains, leaves, and comes back in the other role.

Owned by the gateway machine. `balance` decides when to change; the request manager moves the
requests. Each message is repeated until it takes effect; a worker that dies meanwhile is simply
lost.

    decided ─► drained (no new work; after `role_switch_drain_s` the rest moves elsewhere)
                  └─► left ─► back with a new epoch, in the new role ─► the next may be decided
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake.base import Drain, Role, WorkerRef
from mooncake.rpc.channel import Channel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.balance import RoleBalance, RoleChange, Traffic
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.admission import NO_ROOM_REASONS, OWN_LIMIT_REASONS
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.request_manager import RequestManager

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
        """Start a role change. Return False when another is in progress or there is no such
        worker.
        """
        member = self._membership.get(change.worker_id)
        if self._current is not None or member is None or member.hello.role is change.role:
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
