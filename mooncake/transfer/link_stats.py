"""What went over each link: bytes, latency, retries and failures by protocol, NIC and peer.

Owned by the thread that moves the bytes; others read snapshots, which may be one event old.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

LATENCY_BOUNDS_S = (
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds of the latency buckets; one more holds what is longer."""
_MANY_LINKS = 4096


class LinkSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One link since the process started."""

    protocol: str
    nic: str
    peer: str
    num_bytes: int
    num_slices: int
    busy_s: float
    """Time during which something was under way."""
    num_retries: int
    """Slices that went again."""
    num_failures: int
    """Times the link broke."""
    latency_buckets: list[int]
    """Slices by time from posting to completion, one count for each of `LATENCY_BOUNDS_S` + 1."""

    @property
    def gigabytes_per_s(self) -> float:
        """Mean rate while busy (1e9 bytes a second)."""
        return self.num_bytes / self.busy_s / 1e9 if self.busy_s else 0.0


@dataclass(slots=True)
class _Link:
    num_bytes: int = 0
    num_slices: int = 0
    busy_s: float = 0.0
    idle_since_s: float = 0.0
    num_retries: int = 0
    num_failures: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))


def _name(entry: tuple[tuple[str, str], _Link]) -> tuple[str, str]:
    return entry[0]


class LinkStats:
    """Counters of all links of one backend."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._links: dict[tuple[str, str], _Link] = {}

    def _link(self, nic: str, peer: str) -> _Link:
        link = self._links.get((nic, peer))
        if link is None:
            while len(self._links) >= _MANY_LINKS:  # peers come and go for ever: forget the oldest
                del self._links[next(iter(self._links))]
            link = self._links[nic, peer] = _Link()
        return link

    def arrived(self, nic: str, peer: str, num_bytes: int, posted_s: float, now_s: float) -> None:
        """A slice has arrived."""
        link = self._link(nic, peer)
        link.num_bytes += num_bytes
        link.num_slices += 1
        link.buckets[bisect_left(LATENCY_BOUNDS_S, now_s - posted_s)] += 1
        link.busy_s += max(0.0, now_s - max(posted_s, link.idle_since_s))
        link.idle_since_s = now_s

    def retried(self, nic: str, peer: str, num_slices: int = 1) -> None:
        """Slices of a broken link go again."""
        self._link(nic, peer).num_retries += num_slices

    def failed(self, nic: str, peer: str) -> None:
        """The link broke."""
        self._link(nic, peer).num_failures += 1

    def snapshot(self) -> list[LinkSnapshot]:
        """Return all links, sorted by NIC and peer."""
        return [
            LinkSnapshot(
                protocol=self._protocol,
                nic=nic,
                peer=peer,
                num_bytes=link.num_bytes,
                num_slices=link.num_slices,
                busy_s=link.busy_s,
                num_retries=link.num_retries,
                num_failures=link.num_failures,
                latency_buckets=list(link.buckets),
            )
            for (nic, peer), link in sorted(self._links.copy().items(), key=_name)
        ]
