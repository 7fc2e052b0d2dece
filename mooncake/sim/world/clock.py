"""Simulated time: a heap of calls, run in order of time and, within one time, of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventHeap:
    """The only clock of a simulated world. Single-threaded: `run_until` makes the due calls."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = 0.0
        self._num_scheduled = 0
        self.num_run = 0

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._now_s

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call `call` at `time_s`, or now if that has passed."""
        self._num_scheduled += 1
        time_s = max(time_s, self._now_s)
        heapq.heappush(self._heap, (time_s, self._num_scheduled, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self._now_s + delay_s, call)

    @property
    def next_s(self) -> float | None:
        """Return when the next call is due, in seconds; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> bool:
        """Run the next call; return False when there is none."""
        if not self._heap:
            return False
        self._now_s, _, call = heapq.heappop(self._heap)
        self.num_run += 1
        call()
        return True

    def run_until(self, time_s: float) -> None:
        """Run all calls due up to `time_s` and set the clock to it."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= time_s:
            self._now_s, _, call = pop(heap)
            self.num_run += 1
            call()
        self._now_s = max(self._now_s, time_s)
