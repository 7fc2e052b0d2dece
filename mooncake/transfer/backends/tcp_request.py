"""What one TCP stream has in hand, its bounds, and how it can end: values of `tcp_lane` and
`tcp_peer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from mooncake.transfer.batches import Part
from mooncake.transfer.regions import HostRegion


@dataclass(frozen=True, kw_only=True)
class LaneLimits:
    """Bounds of one stream."""

    num_requests: int = 16
    """Requests sent and not yet answered."""
    window_bytes: int = 8 * 2**20
    """Their bytes; one request is always allowed. Two slices: more would leave nothing to the other
    streams of a batch that is not very large.
    """
    connect_s: float = 5.0
    """To connect and shake hands."""
    stall_s: float = 30.0
    """Without any progress for this long a stream with work on it counts as broken."""
    idle_s: float = 60.0
    """A stream without work for this long is closed."""


class Request(msgspec.Struct, eq=False):
    """A part on a stream: sent, or being sent, and not yet answered."""

    request_id: int
    part: Part
    regions: list[HostRegion]
    views: list[memoryview]
    """READ: where the answer goes. WRITE: unused after sending."""
    outgoing: list[memoryview]
    posted_s: float
    given_up: bool = False
    """The job has ended: what still comes goes nowhere."""
    num_left: int = 0
    is_ahead: bool = False
    """The first bytes of a long WRITE are to go alone."""


class LaneState(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class LaneFailure:
    """How a stream ended that had not been closed on purpose."""

    reason: str
    parts: list[Part]
    """What it had in hand."""
    connection_id: str | None
    """None: it never was ready."""
