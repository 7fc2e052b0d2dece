"""Knows which pool nodes a client may use, and in which order: its own, the others, then those that
failed a moment ago.

Pure state; it sends nothing. A gateway names the nodes. While no gateway answers, the nodes named
before are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base import MooncakeError, WorkerRef
from mooncake.base.bounded_map import BoundedMap
from mooncake.base.pool_messages import ReplicasFound

SUSPECT_S = 5.0
"""A node that failed is used after all others until it answers a question. The question is asked
after this time, and each time again after twice as long.
"""
MAX_SUSPECT_S = 60.0
GATEWAY_S = 1.0
"""If no gateway has answered by then, the call goes on without one."""
REFRESH_S = 10.0
"""Seconds between two questions to gateways for the nodes while nothing happens; without an answer
it is `GATEWAY_S`.
"""
DOUBT_S = 3.0
"""A node that a gateway does not name is forgotten if it is still not named after this time: a
gateway that was restarted meets the nodes one after another.
"""
MAX_FORGOTTEN = 256
"""Number of lost nodes, and of nodes that failed, that are remembered."""


@dataclass
class Suspect:
    """A node that failed."""

    store: WorkerRef
    probe_s: float
    """When to ask whether it answers again."""
    pause_s: float = SUSPECT_S

    def postpone(self, now: float) -> None:
        """Set the next probe, after twice the last pause."""
        self.pause_s = min(2 * self.pause_s, MAX_SUSPECT_S)
        self.probe_s = now + self.pause_s


class KnownNodes:
    """Knows the pool nodes of one client, and which of them failed lately."""

    def __init__(self, told_own: Callable[[], WorkerRef | None]) -> None:
        """`told_own` returns the client's own node, once the client was told of it."""
        self._told_own = told_own
        self._known: dict[str, WorkerRef] = {}
        """Nodes by id, in the order in which they are used."""
        self._missing: set[str] = set()
        """Known nodes that gateways did not name last time."""
        self._own_id = ""
        self._lost: BoundedMap[str, None] = BoundedMap(MAX_FORGOTTEN)
        """Addresses of nodes that were lost."""
        self.suspects: BoundedMap[str, Suspect] = BoundedMap(MAX_FORGOTTEN)
        """Suspects by address."""
        self.gateway_silent = False
        self.has_learnt = False
        """True once a gateway has named the nodes."""
        self.refresh_s = float("-inf")
        """When to ask gateways for the nodes again."""

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, answer: ReplicasFound | MooncakeError, now: float) -> None:
        """Learn the nodes from a gateway's answer to the question for all. A known node that
        two answers in a row leave out is forgotten.
        """
        self.gateway_silent = isinstance(answer, MooncakeError)
        if isinstance(answer, MooncakeError):
            self.refresh_s = min(self.refresh_s, now + GATEWAY_S)
            return
        self.has_learnt = True
        named = {ref.worker_id for ref in answer.stores}
        doubtful = {
            worker_id: ref
            for worker_id, ref in self._known.items()
            if worker_id not in named and worker_id not in self._missing
        }
        self._known, self._missing = {}, set(doubtful)
        self.add(answer.stores)
        self._known |= doubtful
        if doubtful:
            self.refresh_s = now + DOUBT_S

    def add(self, stores: Sequence[WorkerRef]) -> None:
        """Know these nodes too."""
        for ref in stores:
            self._known[ref.worker_id] = ref
            self._lost.pop(ref.address, None)
        self.find_own()

    def find_own(self) -> None:
        """Remember the client's own node by its id, so that it is found again at another
        address.
        """
        own = self._told_own()
        if own is not None:
            named = [ref.worker_id for ref in self._known.values() if ref.address == own.address]
            self._own_id = own.worker_id or (named or [self._own_id])[0]

    def forget(self, worker: WorkerRef, now: float) -> None:
        """Do not use a lost node until a gateway names it again."""
        known = self._known.get(worker.worker_id)
        if known is not None and known.address == worker.address:
            if known.epoch != worker.epoch:
                return  # an earlier boot of it
            del self._known[worker.worker_id]
        self.suspects.pop(worker.address, None)
        self._lost[worker.address] = None
        self.refresh_s = now

    def failed(self, store: WorkerRef, now: float) -> None:
        """Use a node after all others until it answers again."""
        self.suspects.setdefault(store.address, Suspect(store, now + SUSPECT_S))

    def answered(self, store: WorkerRef) -> None:
        """Trust a node again."""
        self.suspects.pop(store.address, None)

    @property
    def own(self) -> WorkerRef | None:
        """The client's own node at its current address, once known."""
        return self._known.get(self._own_id) or self._told_own()

    def order(self) -> list[WorkerRef]:
        """Return the nodes in the order in which to use them."""
        stores = [ref for ref in (self.own, *self._known.values()) if ref is not None]
        unique = {ref.address: ref for ref in stores if ref.address not in self._lost}
        return sorted(unique.values(), key=self.is_suspect)

    def is_suspect(self, ref: WorkerRef) -> bool:
        return ref.address in self.suspects

    def has_others(self, addresses: Sequence[str]) -> bool:
        """Return whether there may be nodes besides these."""
        return not self.has_learnt or any(
            ref.address not in addresses for ref in self._known.values()
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when a lost node would be used."""
        assert not any(ref.address in self._lost for ref in self._known.values())
