"""Knows the pool nodes that gateways name. A pool client chooses the node that this one copies
from; so this node connects to the address of a node that a gateway names, and to no other.

Pure; owned by the replicator. An order whose source is unknown waits for the gateways' answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.base import WorkerRef
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import FindReplicas, ReplicasFound

if TYPE_CHECKING:
    from mooncake.kvstore.node.blocks import NodePorts

ANSWER_S = 1.0
"""An order is refused when no gateway has named its source within this time."""


class Sources:
    """The nodes to copy from, and the orders that wait until a gateway names theirs."""

    def __init__(self, ports: NodePorts) -> None:
        self._membership, self._channel = ports.membership, ports.channel
        self._named: set[str] = set()
        """The addresses of the nodes that gateways name."""
        self._waiting: list[tuple[float, Replicate]] = []
        """When each order is refused; the oldest order comes first."""

    @property
    def waiting(self) -> list[Replicate]:
        """The orders that wait. The replicator bounds their number."""
        return [order for _, order in self._waiting]

    @property
    def next_s(self) -> float | None:
        """When `overdue` returns the next order."""
        return self._waiting[0][0] if self._waiting else None

    def knows(self, source: WorkerRef) -> bool:
        """Return whether a gateway has named a node with this address. A client may know no more of
        a node than that.
        """
        return source.address in self._named

    def ask(self, order: Replicate, now: float) -> None:
        """Ask all gateways which nodes there are; the order waits for their answers."""
        self._waiting.append((now + ANSWER_S, order))
        question = FindReplicas(asker=self._membership.worker, ticket=0, keys=[], every=True)
        for address in self._membership.welcoming:
            self._channel.send(address, question)

    def on_named(self, answer: ReplicasFound) -> list[Replicate]:
        """Take a gateway's answer; return the orders whose source it names."""
        self._named = {store.address for store in answer.stores}
        found = [order for order in self.waiting if self.knows(order.source)]
        self._waiting = [each for each in self._waiting if not self.knows(each[1].source)]
        return found

    def overdue(self, now: float) -> list[Replicate]:
        """Return the orders whose source no gateway has named in time; they wait no longer."""
        late = [order for end_s, order in self._waiting if end_s <= now]
        del self._waiting[: len(late)]
        return late

    def lose(self, worker: WorkerRef) -> None:
        """Forget a node that was lost."""
        self._named.discard(worker.address)
