"""A clock that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """A `Clock` (see `mooncake.base.clock`) in seconds."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"the clock cannot go back from {self._now_s} to {now_s}"
        self._now_s = now_s
