"""What the router needs of a way to move bytes. Each backend keeps its own state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import Job
from mooncake.transfer.link_stats import LinkStats


class Router(Protocol):
    """Where a backend turns when it cannot serve a job."""

    def decline(self, job: Job, reason: str) -> None:
        """Hand `job` back before anything of it has begun; the next backend gets it, if any."""


class Backend(Protocol):
    """One protocol between this process and its peers."""

    @property
    def protocol(self) -> str:
        """Its name in `SegmentRef.endpoints`."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this process by it."""

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        """What went over its links."""

    def reaches(self, peer: SegmentRef) -> bool:
        """Whether it is worth trying; cheap, asks nobody."""

    def start(self, job: Job) -> None:
        """Move the ops of `job`; never blocks. The local ranges are checked already."""

    def stop_sent(self, job: Job) -> None:
        """`job` was told to stop: make the parts in hand come to an end soon."""

    def pump(self) -> None:
        """Do what this backend does in the driver's own thread (called by every `poll`)."""

    def close(self) -> None:
        """Refuse peers and free everything; open jobs were told to stop before."""
