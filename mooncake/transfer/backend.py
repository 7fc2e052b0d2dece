"""The port between the router and the protocols; each backend keeps its own state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import Job
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats


class Router(Protocol):
    """Takes back the jobs that a backend cannot serve."""

    def decline(self, job: Job, reason: str) -> None:
        """Hand `job`, of which no part has begun, to the next backend, or fail it."""


class Backend(Protocol):
    """One protocol between this process and its peers."""

    @property
    def protocol(self) -> str:
        """The name of the protocol in `SegmentRef.endpoints`."""

    @property
    def endpoint(self) -> str:
        """The endpoint at which peers reach this process by this protocol."""

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        """Counters of the backend's links."""

    def reaches(self, peer: SegmentRef) -> bool:
        """Return whether the peer is worth trying; cheap, no message is sent."""

    def start(self, job: Job) -> None:
        """Begin to move the ops of `job`, whose local ranges are checked; never blocks."""

    def stop_sent(self, job: Job) -> None:
        """Bring the parts of a stopped job to an end soon."""

    def fence(self, grant: int) -> Fence:
        """Return whether peers may still write by a revoked grant, and make sure that they soon
        cannot. The caller has passed all gates of this process since the grant was revoked.
        """

    def close(self) -> None:
        """Refuse peers and free everything; open jobs were stopped before."""
