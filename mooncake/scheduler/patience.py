"""How long a request is waited for: deadlines of clients, and attempts from which nothing comes.

Pure; owned by the desk.
"""

from __future__ import annotations

import heapq

from mooncake.base import RequestState
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.record import RequestRecord

STALL_FACTOR = 10.0
"""A first token may take this many times its prediction before the attempt counts as stalled."""
MAX_STALLS = 4.0
"""But no more than so many times `stall_timeout_s`: the prediction may be lost as well."""


class Deadlines:
    """Which requests must have ended by when. An entry stays when its request ends: whoever takes
    it out looks whether it is still meant.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._num_added = 0

    def add(self, request_id: str, at_s: float) -> None:
        """Remember a deadline."""
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, self._num_added, request_id))

    def pop_due(self, now: float) -> str | None:
        """Take out a request whose deadline has passed, the earliest first."""
        return heapq.heappop(self._heap)[2] if self._heap and self._heap[0][0] <= now else None

    @property
    def next_s(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None


def is_overdue(record: RequestRecord, now: float) -> bool:
    """Whether the request's own time has run out."""
    timeout_s = record.request.timeout_s
    return timeout_s is not None and now - record.accepted_s >= timeout_s


def why_stalled(record: RequestRecord, config: SchedulerConfig, now: float) -> str | None:
    """Return why the present attempt is to be given up; None while there is hope, or none runs."""
    if record.placement is None:
        return None
    quiet_s = now - record.last_progress_s
    patience_s = config.stall_timeout_s
    if record.state is RequestState.PREFILLING:
        predicted_s = STALL_FACTOR * record.placement.predicted_ttft_s
        patience_s = min(max(patience_s, predicted_s), MAX_STALLS * patience_s)
    if record.gap_since_s is not None and now - record.gap_since_s > config.gap_timeout_s:
        return "tokens were lost on their way"
    return f"nothing came for {quiet_s:.0f} s" if quiet_s > patience_s else None
