"""The clock port. Decision code never reads one: it is handed `now` (seconds) by whoever drives
it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a steadily growing scale; only differences mean anything."""

    def now(self) -> float:
        """Return the current time in seconds."""


class MonotonicClock:
    """Real time. On one machine all processes share this scale; between machines only differences
    count.
    """

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told, for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move to `now_s`; going back is a programming error."""
        if now_s < self._now_s:
            raise ValueError(f"the clock cannot go back from {self._now_s} to {now_s}")
        self._now_s = now_s
