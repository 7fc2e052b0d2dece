"""Whether a path is worth trying: a breaker that opens on failures and closes by itself. Pure.

Never a permanent blacklist: an open breaker lets one attempt through when its time has come
(half-open), longer waits follow only while attempts keep failing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """How long a broken path rests."""

    first_s: float = 0.05
    """After the second failure in a row; after the first it may be tried again at once."""
    longest_s: float = 5.0


class Breaker:
    """One path. Closed: use it. Open: do not. Half-open: one attempt is under way to find out."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.num_failures = 0
        """In a row."""
        self._open_until_s = 0.0
        self._probing = False

    @property
    def is_closed(self) -> bool:
        """No failure since the last success."""
        return self.num_failures == 0

    def may_try(self, now: float) -> bool:
        """Whether something may be sent now: anything when closed, one attempt when half-open."""
        return self.is_closed or (not self._probing and now >= self._open_until_s)

    def tried(self) -> None:
        """Something was sent: while half-open nothing else is until its outcome is known."""
        self._probing = not self.is_closed

    def succeeded(self) -> None:
        """Bytes arrived: all is well."""
        self.num_failures = 0
        self._probing = False

    def failed(self, now: float) -> None:
        """The path broke, or did not come up."""
        self.num_failures += 1
        self._probing = False
        rests = min(self.num_failures - 2, 20)
        wait_s = 0.0 if rests < 0 else min(self._limits.longest_s, self._limits.first_s * 2**rests)
        self._open_until_s = now + wait_s

    def untried(self) -> None:
        """The attempt ended for reasons that say nothing about the path."""
        self._probing = False

    def next_try_s(self) -> float | None:
        """When an open breaker turns half-open; None while closed or an attempt is under way."""
        return None if self.is_closed or self._probing else self._open_until_s
