"""Chooses the path of a slice to one peer: one of our NICs and one of the peer's.

Paths near the memory come first, then the least busy; a path that broke rests until its breaker
lets one slice try it. Belongs to one `RdmaPeer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mooncake.transfer.batches import Part
from mooncake.transfer.net.retries import Breaker
from mooncake.transfer.rdma.endpoint import Endpoint, EndpointState, Path
from mooncake.transfer.topology import rank_remote

if TYPE_CHECKING:
    from mooncake.transfer.rdma.backend import RdmaBackend


class PeerPaths:
    """The open paths to one peer, and the breakers of all paths."""

    def __init__(self, hub: RdmaBackend, open_path: Callable[[Path, Breaker], bool]) -> None:
        """`open_path` begins to open a path, and returns False when it cannot be opened now."""
        self.endpoints: dict[Path, Endpoint] = {}
        self._hub = hub
        self._open_path = open_path
        self._ranks: dict[str, list[str]] = {}
        self._breakers: dict[Path, Breaker] = {}
        self._asked_s: dict[Path, float] = {}

    def rank(self, gids: Mapping[str, bytes]) -> None:
        """Rank the peer's NICs, given by name, for each of ours: the best first."""
        self._ranks = {
            name: rank_remote(nic.address.gid, name, gids) for name, nic in self._hub.nics.items()
        }

    def breaker(self, path: Path) -> Breaker:
        """Return the breaker of a path."""
        breaker = self._breakers.get(path)
        if breaker is None:
            breaker = self._breakers[path] = Breaker(self._hub.limits.breaker)
        return breaker

    def next_try_s(self, now: float) -> float | None:
        """Return when a path may be tried again; None when waiting does not help."""
        tries = [breaker.next_try_s() for breaker in self._breakers.values()]
        times = [when for when in tries if when is not None]
        resting = all(breaker.num_failures >= 2 for breaker in self._breakers.values())
        if not any(self._hub.is_up(name) for name in self._hub.nics) or (times and resting):
            return None
        return min(times, default=now)

    def choose(
        self, part: Part, runs: Mapping[Path, Sequence[Part]], now: float
    ) -> Endpoint | None:
        """Return the least busy usable endpoint near the slice's memory; open wanted ones.

        runs: slices that each path will carry before this one.
        """
        near = self._hub.memory.nics_near(part.slice.pieces[0].local_region)
        for names in (near.preferred, near.secondary):
            usable = []
            under_way = False
            for name in names:
                endpoint, is_opening = self._endpoint_of(name, now)
                under_way |= is_opening or endpoint is not None
                if endpoint is None:
                    continue
                mine = runs.get(endpoint.path, ())
                num_bytes = endpoint.num_bytes + sum(other.slice.num_bytes for other in mine)
                requests = sum(len(other.slice.pieces) for other in mine)
                if (
                    endpoint.room - requests >= len(part.slice.pieces)
                    and (num_bytes < self._hub.limits.in_flight_bytes)
                    and (self.breaker(endpoint.path).is_closed or not num_bytes)
                ):
                    usable.append((num_bytes, endpoint.path, endpoint))
            if usable:
                return min(usable)[2]
            if under_way:
                return None
        return None

    def _endpoint_of(self, local: str, now: float) -> tuple[Endpoint | None, bool]:
        """Return the endpoint from one of our NICs over the best rail that works, and whether one
        is being opened.
        """
        if not self._hub.is_up(local):
            return None, False
        for remote in self._ranks[local]:
            path = Path(local, remote)
            endpoint = self.endpoints.get(path)
            if endpoint is not None:
                ready = endpoint.state is EndpointState.READY and not endpoint.leaving
                return (endpoint, False) if ready else (None, True)
            breaker = self.breaker(path)
            in_vain = self._asked_s.get(path) == now  # for another slice of this round
            if in_vain or not breaker.may_try(now):
                continue
            self._asked_s[path] = now
            if self._open_path(path, breaker):
                return None, True
        return None, False
