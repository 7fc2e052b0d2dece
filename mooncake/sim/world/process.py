"""A simulated process: one machine that the heap drives, as the loop of `launch.driver` drives a
real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from mooncake.base.machine import Machine
from mooncake.engine.engine import EngineHung
from mooncake.sim.world.clock import EventHeap

MIN_PAUSE_S = 1e-6
"""An overdue wake-up comes this many seconds later, because time must pass between two ticks."""

AfterEvent = Callable[[Machine], None]


class SimProcess:
    """Drives a machine with events and time until it is killed.

    The machine ticks after each event and at its own wake-up times. A pending timer is reused for a
    later wake-up instead of being replaced, because most wake-ups move before they are due.
    `skew_s` is how far the clock of this process is ahead.
    """

    def __init__(
        self,
        name: str,
        heap: EventHeap,
        after_event: AfterEvent | None = None,
        skew_s: float = 0.0,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """`failed` is called when the machine finds that its engine is hung."""
        self.name = name
        self.skew_s = skew_s
        self._heap = heap
        self._after_event = after_event
        self._failed = failed
        self._machine: Machine | None = None
        self._due_s: float | None = None
        self._timers: list[float] = []
        """When timers of this machine will go off, in any order. There are seldom more than two."""
        self._missed: deque[msgspec.Struct] | None = None
        """The events that came while the process hung."""

    @property
    def alive(self) -> bool:
        return self._machine is not None

    @property
    def stands_still(self) -> bool:
        return self._missed is not None

    def now(self) -> float:
        """Return the time on this process's own clock."""
        return self._heap.now() + self.skew_s

    def start(self, machine: Machine) -> None:
        self._machine = machine
        self._timers = []
        self.wake(self.now())

    def kill(self) -> None:
        """Stop all events to the machine, as kill -9 does."""
        self._machine = self._due_s = self._missed = None

    def hang(self, seconds: float) -> None:
        """Pause for a while, as SIGSTOP does. Events are handled afterwards."""
        if self._machine is not None and self._missed is None:
            self._missed = deque()
            self._heap.after(seconds, self._go_on)

    def deliver(self, event: msgspec.Struct) -> None:
        """Hand an event to the machine now, then let it tick."""
        machine = self._machine
        if machine is None:
            return
        if self._missed is not None:
            self._missed.append(event)
            return
        machine.handle(event, self._heap.now() + self.skew_s)
        self._tick(machine)

    def wake(self, at_s: float) -> None:
        """Let the machine tick at `at_s` of its own clock, unless it will tick before anyway."""
        if self._machine is None or (self._due_s is not None and self._due_s <= at_s):
            return
        self._due_s = at_s
        if not self._timers or min(self._timers) > at_s:
            self._timers.append(at_s)
            machine = self._machine
            self._heap.at(at_s - self.skew_s, lambda: self._ring(machine, at_s))

    def _ring(self, machine: Machine, timer_s: float) -> None:
        if machine is not self._machine:
            return
        self._timers.remove(timer_s)
        if self._due_s is None or self._missed is not None:
            return
        if self._due_s <= self.now() + MIN_PAUSE_S / 2:
            self._tick(machine)
        else:
            due_s, self._due_s = self._due_s, None
            self.wake(due_s)

    def _tick(self, machine: Machine) -> None:
        if machine is not self._machine:
            return  # the event it handled killed it
        self._due_s = None
        now = self._heap.now() + self.skew_s
        try:
            wake_s = machine.tick(now)
        except EngineHung:
            if self._failed is None:
                raise
            self._failed()
            return
        if self._after_event is not None:
            self._after_event(machine)
        if wake_s is not None and machine is self._machine:
            self.wake(max(wake_s, now + MIN_PAUSE_S))

    def _go_on(self) -> None:
        machine, missed = self._machine, self._missed
        self._missed = None
        if machine is None or missed is None:
            return
        for event in missed:
            self.deliver(event)
        self._due_s = None
        self.wake(self.now())
