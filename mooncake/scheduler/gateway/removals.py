"""Remembers blocks that were removed from the pool while some nodes were away. These nodes are told
when they return, so that the blocks do not reappear from their disks. Pure; owned by the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from mooncake.base import BlockKey, WorkerHello, WorkerRef
from mooncake.base.bounded_map import BoundedMap
from mooncake.base.pool_messages import RemoveBlocks

MAX_REMOVED = 65_536
"""Blocks remembered; the oldest removals are dropped first."""
MAX_AWAY = 4_096
"""Nodes remembered; the oldest are dropped first. An unknown node is told of all blocks."""
MESSAGE_BLOCKS = 4_096


class RemovedBlocks:
    """The blocks removed lately, and the nodes that are away."""

    def __init__(self, own: WorkerRef) -> None:
        self._own = own
        self._numbers: BoundedMap[BlockKey, int] = BoundedMap(MAX_REMOVED)
        """Block -> the number of the removal that it was part of."""
        self._last = 0
        self._away: BoundedMap[str, int] = BoundedMap(MAX_AWAY)
        """Node id -> the last removal before the node was lost."""

    def on_removed(self, keys: Sequence[BlockKey]) -> None:
        """Record that these blocks are being removed from all nodes that are present."""
        self._last += 1
        for key in keys:
            self._numbers[key] = self._last

    def on_lost(self, worker_id: str) -> None:
        """Record that a node is away from now on."""
        self._away[worker_id] = self._last

    def missed(self, hello: WorkerHello) -> Iterator[RemoveBlocks]:
        """Yield the removals that a node which has just joined has missed."""
        since = self._away.pop(hello.worker.worker_id, 0)
        missed = (key for key, number in self._numbers.items() if number > since)
        while keys := list(islice(missed, MESSAGE_BLOCKS)):
            yield RemoveBlocks(asker=self._own, ticket=0, keys=keys)
