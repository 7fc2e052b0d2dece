"""A simulated process: one machine driven by the heap, as `launch.driver` drives it by a loop."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.base.machine import Machine
from mooncake.sim.clock import EventHeap


class SimProcess:
    """Brings events and time to a machine until it is killed."""

    def __init__(self, name: str, heap: EventHeap, after_event: Callable[[], None]) -> None:
        self.name = name
        self._heap = heap
        self._after_event = after_event
        self._machine: Machine | None = None
        self._tick_due: float | None = None

    @property
    def alive(self) -> bool:
        return self._machine is not None

    def start(self, machine: Machine) -> None:
        """Drive `machine` from now on."""
        self._machine = machine
        self.wake(self._heap.now())

    def kill(self) -> None:
        """Nothing reaches the machine any more, as after kill -9."""
        self._machine = None
        self._tick_due = None

    def deliver(self, event: msgspec.Struct) -> None:
        """Hand an event to the machine now, then let it tick."""
        if self._machine is None:
            return
        self._machine.handle(event, self._heap.now())
        self._after_event()
        self.wake(self._heap.now())

    def wake(self, at_s: float) -> None:
        """Let the machine tick at `at_s`, unless it will tick before anyway."""
        if self._machine is None or (self._tick_due is not None and self._tick_due <= at_s):
            return
        self._tick_due = at_s
        machine = self._machine
        self._heap.at(at_s, lambda: self._tick(machine, at_s))

    def _tick(self, machine: Machine, due_s: float) -> None:
        if machine is not self._machine or self._tick_due != due_s:
            return
        self._tick_due = None
        wake_s = machine.tick(self._heap.now())
        self._after_event()
        if wake_s is not None:
            # A wake-up that is overdue comes a moment later: time must pass between two ticks.
            self.wake(max(wake_s, self._heap.now() + 1e-6))
