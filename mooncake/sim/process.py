"""A simulated process: one machine driven by the heap, as `launch.driver` drives it by a loop."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.base.machine import Machine
from mooncake.sim.clock import EventHeap

MIN_PAUSE_S = 1e-6
"""A wake-up that is overdue comes so much later: time must pass between two ticks."""


class SimProcess:
    """Brings events and time to a machine until it is killed.

    The machine ticks after each event, and when it wanted to. A timer that was set once is used
    again for a later wish rather than set anew: most wishes move before they are due.
    """

    def __init__(self, name: str, heap: EventHeap, after_event: Callable[[], None]) -> None:
        self.name = name
        self._heap = heap
        self._after_event = after_event
        self._machine: Machine | None = None
        self._due_s: float | None = None
        self._timers: list[float] = []
        """When timers of this machine will go off, in any order; seldom more than two."""

    @property
    def alive(self) -> bool:
        return self._machine is not None

    def start(self, machine: Machine) -> None:
        """Drive `machine` from now on."""
        self._machine = machine
        self._timers = []
        self.wake(self._heap.now())

    def kill(self) -> None:
        """Nothing reaches the machine any more, as after kill -9."""
        self._machine = None
        self._due_s = None

    def deliver(self, event: msgspec.Struct) -> None:
        """Hand an event to the machine now, then let it tick."""
        machine = self._machine
        if machine is None:
            return
        machine.handle(event, self._heap.now())
        self._tick(machine)

    def wake(self, at_s: float) -> None:
        """Let the machine tick at `at_s`, unless it will tick before anyway."""
        if self._machine is None or (self._due_s is not None and self._due_s <= at_s):
            return
        self._due_s = at_s
        if not self._timers or min(self._timers) > at_s:
            self._timers.append(at_s)
            machine = self._machine
            self._heap.at(at_s, lambda: self._ring(machine, at_s))

    def _ring(self, machine: Machine, timer_s: float) -> None:
        if machine is not self._machine:
            return
        self._timers.remove(timer_s)
        if self._due_s is None:
            return
        if self._due_s <= self._heap.now():
            self._tick(machine)
        else:
            due_s, self._due_s = self._due_s, None
            self.wake(due_s)

    def _tick(self, machine: Machine) -> None:
        self._due_s = None
        now = self._heap.now()
        wake_s = machine.tick(now)
        self._after_event()
        if wake_s is not None and machine is self._machine:
            self.wake(max(wake_s, now + MIN_PAUSE_S))
