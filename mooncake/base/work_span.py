"""What a worker tells of its work on a traced request: spans of time by its own clock.

Names and figures only: no tokens, no text.
"""

from __future__ import annotations

import msgspec

Fact = str | int | float | bool
"""The value of an attribute."""


class WorkEvent(msgspec.Struct, frozen=True, array_like=True):
    """A moment within a span."""

    name: str
    at_s: float
    facts: dict[str, Fact] = {}


class WorkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: "fetch", "queue", "prefill", "reserve", "transfer" or "decode"."""

    name: str
    worker_id: str
    """Whose clock it is, as `LoadReport.clock_s` tells it."""
    start_s: float
    end_s: float
    facts: dict[str, Fact] = {}
    events: list[WorkEvent] = []
