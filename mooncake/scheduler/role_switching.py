"""Role changes carried out: a worker is drained, leaves, and comes back in the other role.

Owned by the gateway machine. When to change is `balance`'s decision, what runs on the worker the
desk's. Every word is repeated until it shows: a worker that dies on the way is one lost worker.

    decided ─► drained (nothing new; after `role_switch_drain_s` what still runs moves elsewhere)
                  └─► left ─► back with a new epoch, in the new role ─► the next may be decided
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake.base import Drain, Role, WorkerRef
from mooncake.rpc.channel import Channel
from mooncake.scheduler.admission import NO_ROOM_REASONS
from mooncake.scheduler.balance import RoleBalance, RoleChange, Traffic
from mooncake.scheduler.conductor import Conductor
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.desk import RequestDesk
from mooncake.scheduler.roster import Roster

LOOK_S = 1.0
GIVE_UP_S = 300.0
"""A worker that has not come back for so long does not hold up other changes any more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    worker: WorkerRef
    """As it was before."""
    role: Role
    """To be."""
    since_s: float


class RoleSwitching:
    """At most one worker changes at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        channel: Channel,
        roster: Roster,
        conductor: Conductor,
        desk: RequestDesk,
    ) -> None:
        self._config = config
        self._channel = channel
        self._roster = roster
        self._conductor = conductor
        self._desk = desk
        self._balance = RoleBalance(config)
        self._under_way: _UnderWay | None = None
        self._next_s = float("-inf")

    def tick(self, now: float) -> float | None:
        """Look at the balance, or after the change under way. Returns when to come again."""
        if self._under_way is None and not (self._config.role_switching and len(self._roster)):
            return None
        if now >= self._next_s:
            self._next_s = now + LOOK_S
            if self._under_way is not None:
                self._pursue(self._under_way, now)
            else:
                change = self._balance.look(self._conductor.views, self._traffic(), now)
                if change is not None:
                    self.begin(change, now)
        return self._next_s

    def _traffic(self) -> Traffic:
        counts = self._desk.counters
        return Traffic(
            offered=counts["requests_accepted"] + counts["requests_refused"],
            refused_prefill=counts["refused_ttft_limit"],
            refused_decode=sum(counts[f"refused_{reason}"] for reason in NO_ROOM_REASONS),
        )

    def begin(self, change: RoleChange, now: float) -> bool:
        """Have a worker change its role; False when another does, or there is no such worker."""
        member = self._roster.get(change.worker_id)
        if self._under_way is not None or member is None or member.hello.role is change.role:
            return False
        self._next_s = now + LOOK_S
        logger.info("worker %s is to become %s", change.worker_id, change.role.value)
        self._under_way = _UnderWay(member.hello.worker, change.role, now)
        member.draining = True
        self._conductor.on_draining(change.worker_id)
        self._pursue(self._under_way, now)
        return True

    def _pursue(self, change: _UnderWay, now: float) -> None:
        worker, waited_s = change.worker, now - change.since_s
        member = self._roster.get(worker.worker_id)
        if self._roster.live(worker):
            self._channel.send(worker.address, Drain(then=change.role))
            if waited_s >= self._config.role_switch_drain_s:
                self._desk.move_from(worker.worker_id, now)
        elif member is not None:
            if member.hello.role is change.role:
                self._desk.counters["roles_switched"] += 1
            self._end()
        elif waited_s >= GIVE_UP_S:
            self._end()

    def _end(self) -> None:
        self._under_way = None
        self._balance.rest()
