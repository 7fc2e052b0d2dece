"""The values that a TCP connection and its `TcpPeer` exchange: requests, bounds, states and
failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from mooncake.transfer.batches import Part
from mooncake.transfer.regions import HostRegion
from mooncake.transfer.tcp.frames import Outgoing


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection."""

    num_requests: int = 16
    """Requests sent and not yet answered."""
    window_bytes: int = 8 * 2**20
    """Bytes of these requests; one request is always allowed. That is two slices: more would leave
    nothing to the other connections of a batch that is not very large.
    """
    connect_s: float = 5.0
    """Time to connect and shake hands."""
    stall_s: float = 30.0
    """A connection with work on it but no progress for this long counts as broken."""
    idle_s: float = 60.0
    """A connection without work for this long is closed."""


class Request(msgspec.Struct, eq=False):
    """A slice on a connection that was sent, or is being sent, and is not answered yet."""

    request_id: int
    part: Part
    regions: list[HostRegion]
    views: list[memoryview]
    """READ: where the answer goes."""
    outgoing: Outgoing
    posted_s: float
    given_up: bool = False
    """True if its job has ended, so that what still comes is dropped."""


class ConnectionState(Enum):
    """The state of a connection."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """The end of a connection that was not closed on purpose."""

    reason: str
    parts: list[Part]
    """The parts that it had in hand."""
    connection_id: str | None
    """The connection's id; None if it never was ready."""
