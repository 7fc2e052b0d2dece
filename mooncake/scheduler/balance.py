"""Whether prefill and decode have the workers they need: which worker is to change its role.

Pure; values and `now` in, at most one change out. A pool that is pressed gets a worker from the
other one when that can spare it, and when both have been so for long: what comes and goes in a
minute is no reason, since a worker that changes serves nobody meanwhile and comes back with an
empty cache. Apart bounds (pressed at 0.85, to spare at 0.7 *after* the change)
keep a worker from being sent back and forth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake.base import Role
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.views import InstanceView

PRESSED = 0.85
"""A pool with this load or more needs help."""
SPARE = 0.7
"""A pool that would have this load or less with a worker fewer can give one."""
QUEUE_SHARE = 0.5
"""Of the limit on the first token: prompts that queue for so long press the prefill pool."""
QUEUE_S = 5.0
"""The same where there is no limit."""
REFUSING = 0.25
"""A pool for whose sake requests were refused in so many of the last looks needs help as well:
early rejection keeps its load down.
"""
MOST = 1.5
"""Loads count up to this: a burst, however large, is soon forgotten."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Requests refused since the start: for want of prefill, of decode."""

    prefill: int
    decode: int


class _Loads(NamedTuple):
    queue: float
    """Prompts queued, in shares of how long they may queue."""
    busy: float
    """Share of prefill workers that have something to compute."""
    decode: float
    refused_prefill: float
    """Share of looks since which somebody was refused."""
    refused_decode: float


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One worker is to serve in the other role."""

    worker_id: str
    role: Role


class RoleBalance:
    """The loads of the two pools over time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._loads = _Loads(0.0, 0.0, 0.0, 0.0, 0.0)
        self._refused = Refused(0, 0)
        self._looked_s: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def look(
        self, views: Sequence[InstanceView], refused: Refused, now: float
    ) -> RoleChange | None:
        """Take a look at all workers, and at who was refused so far; return what is to change, when
        it has been due for long.
        """
        prefills = [view for view in views if view.role is Role.PREFILL and not view.draining]
        decodes = [view for view in views if view.role is Role.DECODE and not view.draining]
        before, self._refused = self._refused, refused
        if not prefills or not decodes:
            self.rest()
            return None
        seen = _Loads(
            queue=min(MOST, _mean([self._queue_load(view) for view in prefills])),
            busy=_mean([float(view.num_queued_tokens() > 0) for view in prefills]),
            decode=min(MOST, _mean([self._decode_load(view) for view in decodes])),
            refused_prefill=float(refused.prefill > before.prefill),
            refused_decode=float(refused.decode > before.decode),
        )
        self._average(seen, now)
        wanted = self._needs(len(prefills), len(decodes))
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now
        if wanted is None or now - self._wanted_since_s < self._config.role_switch_after_s:
            return None
        givers = decodes if wanted is Role.PREFILL else prefills
        return RoleChange(min(givers, key=_in_use).worker_id, wanted)

    def rest(self) -> None:
        """Forget what was seen: the pools are about to be others, or have just become so."""
        self._wanted = self._looked_s = None
        self._loads = _Loads(0.0, 0.0, 0.0, 0.0, 0.0)

    def _needs(self, num_prefills: int, num_decodes: int) -> Role | None:
        """Return the role that needs a worker and can have one."""
        loads = self._loads
        prefill_pressed = loads.queue >= PRESSED or loads.refused_prefill >= REFUSING
        decode_pressed = loads.decode >= PRESSED or loads.refused_decode >= REFUSING
        if prefill_pressed == decode_pressed:
            return None
        if prefill_pressed:
            return Role.PREFILL if _without_one(loads.decode, num_decodes) <= SPARE else None
        load = max(loads.busy, loads.queue)
        return Role.DECODE if _without_one(load, num_prefills) <= SPARE else None

    def _average(self, seen: _Loads, now: float) -> None:
        window_s = self._config.role_switch_after_s
        if self._looked_s is not None:
            share = 1 - math.exp((self._looked_s - now) / window_s) if window_s else 1.0
            old = self._loads
            self._loads = _Loads(*(a + share * (b - a) for a, b in zip(old, seen, strict=True)))
        self._looked_s = now

    def _queue_load(self, view: InstanceView) -> float:
        """Return how long prompts queue here, in shares of how long they may."""
        limit_s = self._config.ttft_slo_s
        return view.queued_s() / (QUEUE_S if limit_s is None else QUEUE_SHARE * limit_s)

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
            idle_s = min(view.cost.tbt_s(1, 0), SPARE * limit_s)
            gap_s = view.cost.tbt_s(load.num_running, load.num_context_tokens)
            share = max(share, (gap_s - idle_s) / (limit_s - idle_s))
        return share


def _without_one(load: float, count: int) -> float:
    """Return a pool's load with one worker fewer."""
    return load * count / (count - 1) if count > 1 else math.inf


def _in_use(view: InstanceView) -> tuple[int, int, str]:
    """Return how much a change would disturb here."""
    return view.num_assigned, view.load.num_cached_blocks, view.worker_id


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
