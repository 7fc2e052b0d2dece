"""Counts what goes over each link: bytes, latency, retries and failures by protocol, NIC and peer.

Thread-safe: the threads that move bytes count, any other thread reads snapshots.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

LATENCY_BOUNDS_S = (
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds of the latency buckets; one more holds what is longer."""
MEMORY = "memory"
"""Stands for the NIC where bytes are copied from memory to memory."""
_MANY_LINKS = 4096
_QUIET_S = 3600.0
"""A link that was not used for this long counts as gone."""


class LinkSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of one link since the process started."""

    protocol: str
    nic: str
    peer: str
    num_bytes: int
    num_slices: int
    busy_s: float
    """Time during which something was under way."""
    num_retries: int
    """Slices that were sent again."""
    num_failures: int
    """Times the link broke."""
    latency_s: float
    """Sum over all slices of the time from posting to completion."""
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
    used_s: float = 0.0
    num_retries: int = 0
    num_failures: int = 0
    latency_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def add(self, other: _Link) -> None:
        """Add the sums of another link (not its latencies)."""
        self.num_bytes += other.num_bytes
        self.num_slices += other.num_slices
        self.busy_s += other.busy_s
        self.num_retries += other.num_retries
        self.num_failures += other.num_failures


def _name(entry: tuple[tuple[str, str], _Link]) -> tuple[str, str]:
    return entry[0]


class LinkStats:
    """Counters of all links of one backend."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._lock = threading.Lock()
        self._links: OrderedDict[tuple[str, str], _Link] = OrderedDict()
        """(NIC, peer) -> its figures. The link used last is at the end."""
        self._forgotten = _Link()
        self._now_s = 0.0

    def _link(self, nic: str, peer: str) -> _Link:
        link = self._links.get((nic, peer))
        if link is None:
            self._make_room()
            link = self._links[nic, peer] = _Link()
        self._links.move_to_end((nic, peer))
        link.used_s = self._now_s
        return link

    def _make_room(self) -> None:
        """Forget the links of peers that are gone. If there are still too many, forget the
        oldest.
        """
        while self._links:
            quiet_s = self._now_s - next(iter(self._links.values())).used_s
            if len(self._links) < _MANY_LINKS and quiet_s < _QUIET_S:
                break
            self._forgotten.add(self._links.popitem(last=False)[1])

    def arrived(self, nic: str, peer: str, num_bytes: int, posted_s: float, now_s: float) -> None:
        """Count a slice that has arrived."""
        with self._lock:
            self._now_s = max(self._now_s, now_s)
            link = self._link(nic, peer)
            link.num_bytes += num_bytes
            link.num_slices += 1
            link.latency_s += now_s - posted_s
            link.buckets[bisect_left(LATENCY_BOUNDS_S, now_s - posted_s)] += 1
            link.busy_s += max(0.0, now_s - max(posted_s, link.idle_since_s))
            link.idle_since_s = max(link.idle_since_s, now_s)

    def retried(self, nic: str, peer: str, num_slices: int = 1) -> None:
        """Count slices that are sent again after their link broke."""
        with self._lock:
            self._link(nic, peer).num_retries += num_slices

    def failed(self, nic: str, peer: str) -> None:
        """Count that a link broke."""
        with self._lock:
            self._link(nic, peer).num_failures += 1

    def snapshot(self) -> list[LinkSnapshot]:
        """Return all links, sorted by NIC and peer."""
        with self._lock:
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
                    latency_s=link.latency_s,
                    latency_buckets=list(link.buckets),
                )
                for (nic, peer), link in sorted(self._links.items(), key=_name)
            ]

    def totals(self) -> Mapping[str, float]:
        """Return the sums over all links there ever were, by name; they never fall."""
        with self._lock:
            total = _Link()
            for link in (self._forgotten, *self._links.values()):
                total.add(link)
        return {
            f"transfer_{self._protocol}_bytes": total.num_bytes,
            f"transfer_{self._protocol}_slices": total.num_slices,
            f"transfer_{self._protocol}_seconds": total.busy_s,
            f"transfer_{self._protocol}_retries": total.num_retries,
            f"transfer_{self._protocol}_failures": total.num_failures,
        }
