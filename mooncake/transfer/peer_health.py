"""Remembers peers that could not be reached. Requests to them fail at once, except one at a time
that tries again.

Tries become rarer but never stop: a peer that refuses now (an older release, another secret) may
accept later. Owned by a backend; may be used from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake.base.bounded_map import BoundedMap
from mooncake.transfer.path_health import Breaker, BreakerLimits

PROBES = BreakerLimits(first_s=0.05, longest_s=2.0)
PROBE_S = 30.0
"""An attempt that has had no outcome for this long counts as over."""
MAX_REMEMBERED = 4_096
"""Peers that failed. When there are more, the one that failed first is forgotten."""

Key = tuple[str, str]
"""(endpoint, engine id)"""


@dataclass
class _Failure:
    breaker: Breaker
    reason: str
    tried_s: float = 0.0
    """Time at which the last attempt began."""


class PeerHealth:
    """Attempts to connect, by peer. A connection that worked and then broke is not a failed
    attempt.
    """

    def __init__(
        self, limits: BreakerLimits = PROBES, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._now = now
        self._failures: BoundedMap[Key, _Failure] = BoundedMap(MAX_REMEMBERED)
        self._lock = threading.Lock()

    def refusal(self, key: Key) -> str | None:
        """Return why nothing is sent to a peer now, or None. If the last attempt failed, a caller
        that gets None makes the next attempt, and must report its outcome to `reached`, `failed` or
        `unknown`.
        """
        with self._lock:
            failure = self._failures.get(key)
            if failure is None:
                return None
            now = self._now()
            if now >= failure.tried_s + PROBE_S:
                failure.breaker.untried()
            if not failure.breaker.may_try(now):
                return failure.reason
            failure.breaker.tried()
            failure.tried_s = now
            return None

    def reached(self, key: Key) -> None:
        """Record that the peer has let us in."""
        with self._lock:
            self._failures.pop(key, None)

    def failed(self, key: Key, reason: str) -> None:
        """Record that the peer refused, or did not answer."""
        with self._lock:
            failure = self._failures.get(key)
            if failure is None:
                failure = self._failures[key] = _Failure(Breaker(self._limits), reason)
            failure.reason = reason
            failure.breaker.failed(self._now())

    def unknown(self, key: Key) -> None:
        """Record that an attempt ended for reasons that have nothing to do with the peer."""
        with self._lock:
            if key in self._failures:
                self._failures[key].breaker.untried()
