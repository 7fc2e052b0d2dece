"""How the clocks of workers differ from the gateway's, learned from their load reports.

A report says what the worker's clock showed when it was sent. It came some time after that, so of
several reports the one that took least shows the difference best: times that are translated by it
are late by the shortest time that a message took, and no more.
"""

from __future__ import annotations

from collections import deque

MAX_REPORTS = 60
"""About a minute of them: in longer, clocks drift apart by more than a message takes."""


class WorkerClocks:
    """The last reports of each worker."""

    def __init__(self) -> None:
        self._ahead_s: dict[str, deque[float]] = {}
        """Worker -> by how much the gateway's clock was ahead of what each report said."""

    def reported(self, worker_id: str, clock_s: float, now: float) -> None:
        """Take a report that has come now."""
        known = self._ahead_s.setdefault(worker_id, deque(maxlen=MAX_REPORTS))
        known.append(now - clock_s)

    def forget(self, worker_id: str) -> None:
        """Drop what is known of a worker that has left or begins anew."""
        self._ahead_s.pop(worker_id, None)

    def ahead_s(self, worker_id: str) -> float | None:
        """Return what to add to a worker's times to have the gateway's; None: it has not reported
        yet.
        """
        known = self._ahead_s.get(worker_id)
        return min(known) if known else None
