"""What a worker tells of its work on a traced request: spans of time by its own clock.

Times are counted back from the moment at which the message that carries them is sent, so that the
clocks of two hosts need not agree. Names and figures only: no tokens, no text.
"""

from __future__ import annotations

import msgspec

Fact = str | int | float | bool
"""The value of an attribute."""


class WorkEvent(msgspec.Struct, frozen=True, array_like=True):
    """A moment within a span."""

    name: str
    ago_s: float
    facts: dict[str, Fact] = {}


class WorkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: "fetch", "queue", "prefill", "reserve", "transfer" or "decode"."""

    name: str
    ago_s: float
    """When it ended."""
    seconds: float
    facts: dict[str, Fact] = {}
    events: list[WorkEvent] = []
