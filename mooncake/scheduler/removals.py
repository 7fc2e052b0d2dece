"""Blocks removed from the pool while some of its nodes were away: they are told when they come,
so that nothing rises again from their disks. Pure; owned by the gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from mooncake.base import BlockKey, WorkerHello, WorkerRef
from mooncake.base.pool_messages import RemoveBlocks

MAX_REMOVED = 65_536
"""Blocks remembered, those removed last."""
MAX_AWAY = 4_096
"""Nodes remembered, those lost last. One that is not known is told of all blocks."""
MESSAGE_BLOCKS = 4_096


class RemovedBlocks:
    """See the module."""

    def __init__(self, own: WorkerRef) -> None:
        self._own = own
        self._numbers: OrderedDict[BlockKey, int] = OrderedDict()
        """Block -> when it was removed, counted in removals."""
        self._last = 0
        self._away: OrderedDict[str, int] = OrderedDict()
        """Id of a node -> the last removal before it was lost."""

    def add(self, keys: Sequence[BlockKey]) -> None:
        """These are being removed from all nodes that are there."""
        self._last += 1
        for key in keys:
            self._numbers[key] = self._last
            self._numbers.move_to_end(key)
        while len(self._numbers) > MAX_REMOVED:
            self._numbers.popitem(last=False)

    def lost(self, worker_id: str) -> None:
        """A node is away from now on."""
        self._away[worker_id] = self._last
        self._away.move_to_end(worker_id)
        if len(self._away) > MAX_AWAY:
            self._away.popitem(last=False)

    def back(self, hello: WorkerHello) -> Iterator[RemoveBlocks]:
        """A node has come: yield what it is to be told."""
        since = self._away.pop(hello.worker.worker_id, 0)
        missed = (key for key, number in self._numbers.items() if number > since)
        while keys := list(islice(missed, MESSAGE_BLOCKS)):
            yield RemoveBlocks(asker=self._own, ticket=0, keys=keys)
