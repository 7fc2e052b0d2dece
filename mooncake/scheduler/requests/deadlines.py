"""Deadlines of requests, and the test for attempts that no longer make progress.

Pure; owned by the request manager.
"""

from __future__ import annotations

import heapq

from mooncake.base import RequestState
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.requests.record import RequestRecord

STALL_FACTOR = 10.0
"""An attempt counts as stalled when its first token takes this many times the predicted TTFT."""
MAX_STALLS = 4.0
"""It counts as stalled at the latest after this many times `stall_timeout_s`, because the
prediction may be wrong.
"""


class Deadlines:
    """Request ids by deadline, the earliest first. An entry stays when its request ends, so the
    caller of `pop_due` checks whether the request still exists.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._num_added = 0

    def add(self, request_id: str, at_s: float) -> None:
        """Add a deadline."""
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, self._num_added, request_id))

    def pop_due(self, now: float) -> str | None:
        """Remove and return the request with the earliest deadline, if that has passed."""
        return heapq.heappop(self._heap)[2] if self._heap and self._heap[0][0] <= now else None

    @property
    def next_s(self) -> float | None:
        """The earliest deadline; None when there is none."""
        return self._heap[0][0] if self._heap else None


def is_overdue(record: RequestRecord, now: float) -> bool:
    """Return whether the request's own `timeout_s` has passed."""
    timeout_s = record.request.timeout_s
    return timeout_s is not None and now - record.accepted_s >= timeout_s


def stall_reason(record: RequestRecord, config: SchedulerConfig, now: float) -> str | None:
    """Return why the current attempt must be given up; None while it makes progress."""
    if record.placement is None:
        return None
    quiet_s = now - record.last_progress_s
    quiet_limit_s = config.stall_timeout_s
    if record.state is RequestState.PREFILLING:
        predicted_s = STALL_FACTOR * record.placement.predicted_ttft_s
        quiet_limit_s = min(max(quiet_limit_s, predicted_s), MAX_STALLS * quiet_limit_s)
    if record.gap_since_s is not None and now - record.gap_since_s > config.gap_timeout_s:
        return "tokens were lost on their way"
    return f"nothing came for {quiet_s:.0f} s" if quiet_s > quiet_limit_s else None
