"""Starts and ends replicas of a simulated cluster while it runs, and counts what each costs.

The shipped policy decides, or a plain rule to compare it with. The policy itself is the gateway's
(`scheduler.scaling`); here is only what an orchestrator does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from mooncake.base.messages import Role
from mooncake.scheduler.scaling.config import ROLES, ScalingConfig
from mooncake.sim.world.runner import SimRunner
from mooncake.sim.world.world import WorkerSpec, World

FIXED, POLICY, BUSY = "fixed", "policy", "busy"
RULES = (FIXED, POLICY, BUSY)
"""How the number of replicas is decided: not at all; by the gateway's policy; or by how busy the
replicas are, as a HorizontalPodAutoscaler with a target for the mean utilisation does.
"""
LOOK_S = 15.0
"""How often an orchestrator looks, as Kubernetes does."""
DRAIN_S = 300.0
"""How long a replica that leaves may finish its requests."""
BUSY_TARGET = 0.7
"""The utilisation that the plain rule aims at."""
TOLERANCE = 0.1
"""A ratio this near to 1 changes nothing (Kubernetes' default)."""

Counts = Mapping[Role, int]


class Rule(Protocol):
    """Says how many replicas there should be."""

    def wanted(self, counts: Counts) -> Counts:
        """Return the number of each role. `counts`: those that serve or start."""


class FollowPolicy:
    """Says what the policy of the gateway advises."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wanted(self, counts: Counts) -> Counts:
        advice = self._world.gateway.scaling.advice
        return {each.role: each.wanted for each in advice} or counts


class BusyRule:
    """Wants as many replicas as would be busy for `BUSY_TARGET` of the time.

    This is Kubernetes' documented algorithm: the number is multiplied by the measured utilisation
    over the wanted one, and it at most doubles or grows by four. Replicas leave down to the largest
    wish of the last `quiet_s`. It knows no bound for both roles together (`total`).
    """

    def __init__(self, world: World, config: ScalingConfig) -> None:
        self._world = world
        self._config = config
        self._busy_s = dict.fromkeys(ROLES, 0.0)
        self._looked_s: float | None = None
        self._wishes: deque[tuple[float, dict[Role, int]]] = deque()

    def wanted(self, counts: Counts) -> Counts:
        now = self._world.heap.now()
        wishes: dict[Role, int] = {}
        for role in ROLES:
            runners = self._world.runners(role)
            busy_s = sum(each.busy_s for each in runners if isinstance(each, SimRunner))
            grown_s, self._busy_s[role] = busy_s - self._busy_s[role], busy_s
            wishes[role] = counts[role]
            if self._looked_s is not None and counts[role]:
                used = grown_s / (now - self._looked_s) / counts[role]
                wishes[role] = self._wish(counts[role], used / BUSY_TARGET)
            wishes[role] = self._config.bounds(role).clamp(wishes[role])
        self._looked_s = now
        self._wishes.append((now, wishes))
        while self._wishes[0][0] < now - self._config.quiet_s:
            self._wishes.popleft()
        return {
            role: max(wishes[role], min(counts[role], max(w[role] for _, w in self._wishes)))
            for role in ROLES
        }

    @staticmethod
    def _wish(count: int, ratio: float) -> int:
        if abs(ratio - 1) <= TOLERANCE:
            return count
        return min(math.ceil(count * ratio), max(2 * count, count + 4))


class _Replica:
    def __init__(self, role: Role, specs: list[WorkerSpec], began_s: float) -> None:
        self.role = role
        self.specs = specs
        self.began_s = began_s
        self.ended_s: float | None = None
        self.serves = False
        self.leaves = False

    @property
    def engine(self) -> str:
        """The worker that computes."""
        return self.specs[0].worker_id


class Autoscaler:
    """Owns the replicas that a rule asks for. Each costs from when it is ordered until it ends."""

    def __init__(
        self,
        world: World,
        config: ScalingConfig,
        rule: Rule | None,
        specs_of: Callable[[Role, int], list[WorkerSpec]],
    ) -> None:
        """`rule`: None keeps the number of replicas. `specs_of` returns the workers of the replica
        with this role and number, its engine first.
        """
        self._world = world
        self._config = config
        self._rule = rule
        self._specs_of = specs_of
        self._replicas: list[_Replica] = []
        self._next = dict.fromkeys(ROLES, 0)
        self.timeline: list[tuple[float, int, int]] = []
        """When the numbers changed, and how many of prefill and decode were paid for from then."""

    def begin(self, counts: Counts) -> None:
        """Take over the replicas with which the world began, and look from now on."""
        for role in ROLES:
            for _ in range(counts[role]):
                self._order(role).serves = True
        self._note()
        if self._rule is not None:
            self._world.heap.after(LOOK_S, self._look)

    def seconds(self, role: Role, now: float) -> float:
        """Return the seconds of all replicas of a role, added up."""
        return sum(
            (now if each.ended_s is None else min(each.ended_s, now)) - each.began_s
            for each in self._replicas
            if each.role is role
        )

    def _look(self) -> None:
        heap, rule = self._world.heap, self._rule
        assert rule is not None, "only a rule makes it look"
        for each in self._replicas:
            if each.leaves and each.ended_s is None and self._has_left(each):
                each.ended_s = heap.now()
        held = {role: self._held(role) for role in ROLES}
        counts = {role: len(held[role]) for role in ROLES}
        wanted = rule.wanted(counts)
        for role in ROLES:
            for _ in range(wanted[role] - counts[role]):
                self._start_later(self._order(role))
            for each in self._least_used(held[role])[: max(0, counts[role] - wanted[role])]:
                self._give_up(each)
        self._note()
        heap.after(LOOK_S, self._look)

    def _held(self, role: Role) -> list[_Replica]:
        """Return the replicas that serve or start."""
        return [each for each in self._replicas if each.role is role and not each.leaves]

    def _order(self, role: Role) -> _Replica:
        number = self._next[role]
        self._next[role] += 1
        replica = _Replica(role, self._specs_of(role, number), self._world.heap.now())
        self._replicas.append(replica)
        return replica

    def _start_later(self, replica: _Replica) -> None:
        def start() -> None:
            if not replica.leaves:
                replica.serves = True
                for spec in replica.specs:
                    self._world.add(spec)

        self._world.heap.after(self._config.start_s, start)

    def _give_up(self, replica: _Replica) -> None:
        replica.leaves = True
        if replica.serves:
            self._world.retire(replica.engine, DRAIN_S)
        else:
            replica.ended_s = self._world.heap.now()

    def _has_left(self, replica: _Replica) -> bool:
        return self._world.workers[replica.engine].process is None

    def _least_used(self, replicas: Iterable[_Replica]) -> list[_Replica]:
        """Return replicas in the order in which they are given up: those that do not serve yet
        first, then those with the fewest requests.
        """

        def order(replica: _Replica) -> tuple[bool, int, float]:
            view = self._world.conductor.view(replica.engine)
            return replica.serves, view.num_assigned if view is not None else 0, -replica.began_s

        return sorted(replicas, key=order)

    def _note(self) -> None:
        prefill, decode = (
            sum(each.role is role and each.ended_s is None for each in self._replicas)
            for role in ROLES
        )
        if not self.timeline or self.timeline[-1][1:] != (prefill, decode):
            self.timeline.append((self._world.heap.now(), prefill, decode))
