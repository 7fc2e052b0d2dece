"""A circuit breaker that tells whether a path is worth trying: it opens on failures and closes by
itself. Pure.

It never blocks a path for good. An open breaker lets one attempt through when its time has come
(half-open), and waits longer only while attempts keep failing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """How long a path rests after it broke."""

    first_s: float = 0.05
    """The rest after the second failure in a row. After the first failure the path may be tried
    again at once.
    """
    longest_s: float = 5.0


class Breaker:
    """The state of one path. Closed: use it. Open: do not use it. Half-open: one attempt is under
    way to find out.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.num_failures = 0
        """Failures in a row."""
        self._open_until_s = 0.0
        self._probing = False

    @property
    def is_closed(self) -> bool:
        """True if there was no failure since the last success."""
        return self.num_failures == 0

    def may_try(self, now: float) -> bool:
        """Return whether to send now: always when closed, one attempt when half-open."""
        return self.is_closed or (not self._probing and now >= self._open_until_s)

    def tried(self) -> None:
        """Record an attempt: while the breaker is half-open no other may start before its outcome
        is known.
        """
        self._probing = not self.is_closed

    def succeeded(self) -> None:
        """Record that bytes have arrived: the breaker closes."""
        self.num_failures = 0
        self._probing = False

    def failed(self, now: float) -> None:
        """Record that the path broke, or did not come up."""
        self.num_failures += 1
        self._probing = False
        rests = min(self.num_failures - 2, 20)
        wait_s = 0.0 if rests < 0 else min(self._limits.longest_s, self._limits.first_s * 2**rests)
        self._open_until_s = now + wait_s

    def untried(self) -> None:
        """Record that the attempt ended for reasons that have nothing to do with the path."""
        self._probing = False

    def next_try_s(self) -> float | None:
        """Return when an open breaker turns half-open; None when closed, or during an attempt."""
        return None if self.is_closed or self._probing else self._open_until_s
