"""Looks at the cluster every `CHECK_S` and asks the scaling policy how many replicas it needs.

Owned by the gateway machine. It starts and ends no worker: whoever runs workers follows the advice
(`mooncake serve`, an autoscaler of Kubernetes, or the simulator).
"""

from __future__ import annotations

import dataclasses

from mooncake.base import Role
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.requests.request_manager import RequestManager
from mooncake.scheduler.scaling.policy import (
    CHECK_S,
    DecodeRoom,
    ReplicaPolicy,
    RoleAdvice,
    Standing,
)
from mooncake.telemetry.events import Recorder, ReplicasWanted


class ScalingWatch:
    """Keeps the newest advice about the number of replicas."""

    def __init__(
        self,
        config: SchedulerConfig,
        conductor: Conductor,
        request_manager: RequestManager,
        recorder: Recorder,
    ) -> None:
        self._conductor = conductor
        self._request_manager = request_manager
        self._recorder = recorder
        self._policy = ReplicaPolicy(config.scaling, config.ttft_slo_s, config.tbt_slo_s)
        self._room: DecodeRoom | None = None
        self._next_s: float | None = None
        self.advice: tuple[RoleAdvice, ...] = ()
        """Prefill, then decode. Empty before the first look."""

    def tick(self, now: float) -> float | None:
        """Look at the cluster if it is time to. The first look comes when workers have had time to
        join: a gateway that was started again must not advise to end those that it does not know
        yet. Return when to call again, if nothing else may wake a gateway by then: it has no
        workers, whom it would hear, and has refused a request since its last look.
        """
        if self._next_s is None:
            self._next_s = now + CHECK_S
        if now >= self._next_s:
            self._next_s = now + CHECK_S
            self._look(now)
        is_alone = not self._conductor.views
        return self._next_s if is_alone and self._request_manager.demand.has_grown else None

    def _look(self, now: float) -> None:
        offered = self._request_manager.demand.take()
        advice = self._policy.observe(offered, self._standing(), now)
        self.advice = tuple(
            dataclasses.replace(each, counted=frozenset(v.worker_id for v in self._live(each.role)))
            for each in advice
        )
        for each in self.advice:
            self._recorder.record(
                ReplicasWanted(at_s=now, role=each.role, now=each.now, wanted=each.wanted)
            )

    def _standing(self) -> Standing:
        prefills, decodes = self._live(Role.PREFILL), self._live(Role.DECODE)
        if decodes:
            self._room = _room(decodes[0])
        return Standing(
            num_prefill=len(prefills),
            num_decode=len(decodes),
            num_open=len(self._request_manager) or int(not self._conductor.bookings.is_empty),
            queued_s=sum(view.queued_s() for view in prefills or decodes),
            num_decoding=self._request_manager.num_decoding,
            room=self._room,
        )

    def _live(self, role: Role) -> list[InstanceView]:
        """Return the workers of a role that are not about to leave."""
        return [v for v in self._conductor.views if v.role is role and not v.draining]


def _room(view: InstanceView) -> DecodeRoom:
    hello = view.hello
    return DecodeRoom(
        cost=view.cost,
        max_num_seqs=hello.max_num_seqs or hello.num_blocks,
        num_tokens=hello.num_blocks * hello.block_tokens,
    )
