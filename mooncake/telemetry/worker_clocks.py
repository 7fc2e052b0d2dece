"""How the clocks of workers differ from the gateway's, learned from their load reports.

A report says what the worker's clock showed when it was sent, and arrives some time later. So of
several reports, the fastest one shows the difference best. Converted times are late by the time
that this report took, and no more.
"""

from __future__ import annotations

from collections import deque

MAX_REPORTS = 60
"""How many reports are kept: about a minute's. Over a longer time, clocks drift apart by more than
a message takes.
"""


class WorkerClocks:
    """The last reports of each worker."""

    def __init__(self) -> None:
        self._ahead_s: dict[str, deque[float]] = {}
        """Worker -> by how much the gateway's clock was ahead of each report's."""

    def reported(self, worker_id: str, clock_s: float, now: float) -> None:
        """Take a report that has just arrived."""
        known = self._ahead_s.setdefault(worker_id, deque(maxlen=MAX_REPORTS))
        known.append(now - clock_s)

    def forget(self, worker_id: str) -> None:
        """Drop the reports of a worker that has left or has started again."""
        self._ahead_s.pop(worker_id, None)

    def ahead_s(self, worker_id: str) -> float | None:
        """Return what to add to a worker's times to get the gateway's. None: it has not reported
        yet.
        """
        known = self._ahead_s.get(worker_id)
        return min(known) if known else None
