"""The clock port. Decision code never reads a clock: its driver passes `now` (seconds)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a steadily growing scale; only differences are meaningful."""

    def now(self) -> float:
        """Return the current time in seconds."""


class MonotonicClock:
    """Real time. All processes of one machine share this scale; machines do not."""

    def now(self) -> float:
        return time.monotonic()
