"""What a worker reports about its work on a traced request: spans of time by its own clock.

Spans hold only names and figures: no tokens, no text.
"""

from __future__ import annotations

import msgspec

Fact = str | int | float | bool
"""The type of an attribute's value."""


class WorkEvent(msgspec.Struct, frozen=True, array_like=True):
    """A moment within a span."""

    name: str
    at_s: float
    facts: dict[str, Fact] = {}


class WorkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: "fetch", "queue", "prefill", "reserve", "transfer" or "decode"."""

    name: str
    worker_id: str
    """The worker whose clock gives the times; `LoadReport.clock_s` tells that clock."""
    start_s: float
    end_s: float
    facts: dict[str, Fact] = {}
    events: list[WorkEvent] = []
