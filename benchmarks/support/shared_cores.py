"""Several engines on the cores of one machine: who computes beside others computes slower.

For comparisons with a live cluster on one small machine; instances of a real cluster have their
hardware to themselves and need none of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from mooncake.engine.plan import LayerDone, StepPlan
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.runner import SimRunner, StepCost


class _Job:
    """Work under way: seconds that it would still take alone."""

    def __init__(self, left_s: float, done: Callable[[], None]) -> None:
        self.left_s = left_s
        self.done = done


class SharedCores:
    """`num_cores` cores dealt out evenly; two or more at work slow each other down by
    `crowding` besides, as they share caches and memory.
    """

    def __init__(self, heap: EventHeap, num_cores: int, crowding: float = 1.0) -> None:
        self._heap = heap
        self._num_cores = num_cores
        self._crowding = crowding
        self._jobs: list[_Job] = []
        self._since_s = 0.0
        self._num_plans = 0

    def run(self, seconds: float, done: Callable[[], None]) -> None:
        """Call `done` once work of `seconds` (alone, on one core) has been computed."""
        self._advance()
        self._jobs.append(_Job(seconds, done))
        self._plan()

    @property
    def _speed(self) -> float:
        if len(self._jobs) < 2:
            return 1.0
        return min(1.0, self._num_cores / len(self._jobs)) / self._crowding

    def _advance(self) -> None:
        now = self._heap.now()
        progress_s = (now - self._since_s) * self._speed
        for job in self._jobs:
            job.left_s -= progress_s
        self._since_s = now

    def _plan(self) -> None:
        """Come back when the first is done; what was planned before is void."""
        self._num_plans += 1
        if self._jobs:
            left_s = min(job.left_s for job in self._jobs)
            self._heap.after(max(0.0, left_s / self._speed), partial(self._look, self._num_plans))

    def _look(self, plan: int) -> None:
        if plan != self._num_plans:
            return
        self._advance()
        first = min(self._jobs, key=lambda job: job.left_s)
        self._jobs.remove(first)
        self._plan()
        first.done()


class SharedRunner(SimRunner):
    """A runner that computes on shared cores."""

    def __init__(
        self,
        heap: EventHeap,
        cost: StepCost,
        deliver: Callable[[msgspec.Struct], None],
        cores: SharedCores,
        between_s: float = 0.0,
        **settings: Any,
    ) -> None:
        """`between_s` passes between a step's end and the word of it: what engine and driver take
        in life. `settings` are those of `SimRunner`.
        """
        super().__init__(heap, cost, deliver, **settings)
        self._cores = cores
        self._between_s = between_s
        self._queue: deque[tuple[StepPlan, float]] = deque()

    def _start(self, plan: StepPlan, seconds: float) -> None:
        self._queue.append((plan, seconds))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        plan, seconds = self._queue[0]
        num_parts = self._num_layer_reports if plan.report_layers else 1
        self._compute(plan, seconds / num_parts, num_parts, 1, self._heap.now())

    def _compute(
        self, plan: StepPlan, part_s: float, num_parts: int, part: int, begun_s: float
    ) -> None:
        def end() -> None:
            if part < num_parts:
                layer = part * self._num_layers // num_parts - 1
                self._deliver(LayerDone(step_id=plan.step_id, layer=layer))
                self._compute(plan, part_s, num_parts, part + 1, begun_s)
                return
            seconds = self._heap.now() - begun_s
            self.busy_s += seconds
            self._queue.popleft()
            if self._queue:
                self._begin()
            self._heap.after(self._between_s, partial(self._finish, plan, seconds))

        self._cores.run(part_s, end)
