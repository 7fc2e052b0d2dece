"""Answers pool nodes and clients of the pool: which nodes hold these blocks and which others exist,
where a draining node may leave its own, and which blocks were removed while a node was away. Pure;
owned by the gateway. All answers are hints.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from zlib import crc32

from mooncake.base import BlockKey, Role, WorkerHello, WorkerRef
from mooncake.base.bounded_map import BoundedMap, SharedMap
from mooncake.base.pool_messages import (
    FindHomes,
    FindReplicas,
    ForgetBlocks,
    Home,
    HomesFound,
    RemoveBlocks,
    ReplicasFound,
)
from mooncake.base.rights import client_key
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.views import InstanceView

MAX_HOLDERS = 16
"""Nodes named in one answer."""
MAX_HOMES = 16
"""Nodes named in one answer: those with the most free blocks."""
MAX_REMOVED = 65_536
"""Blocks remembered. When there are more, the oldest removals of the client credential that has
removed most are dropped.
"""
MAX_AWAY = 4_096
"""Nodes remembered; the oldest are dropped first. An unknown node is told of all blocks."""
MESSAGE_BLOCKS = 4_096


def find_all(question: FindReplicas | ForgetBlocks, conductor: Conductor) -> ReplicasFound:
    """Return all pool nodes."""
    stores = [view.worker for view in conductor.views if view.role is Role.KVSTORE]
    num_blocks = [0] * len(stores)
    return ReplicasFound(
        asker=question.asker, ticket=question.ticket, stores=stores, num_blocks=num_blocks
    )


def find_replicas(question: FindReplicas, conductor: Conductor) -> ReplicasFound:
    """Return the pool nodes that hold the longest part of the run, then others that take blocks.
    The order of the others depends on the asker, so that the clients of a lost node spread over the
    remaining nodes.
    """
    if question.every:
        return find_all(question, conductor)
    held = conductor.holders(question.keys) if question.keys else {}
    asker = question.asker.worker_id

    def rank(view: InstanceView) -> tuple[int, int]:
        return -held.get(view.worker_id, 0), crc32(f"{asker} {view.worker_id}".encode())

    pools = [
        view
        for view in conductor.views
        if view.role == Role.KVSTORE and (not view.draining or view.worker_id in held)
    ]
    found = heapq.nsmallest(MAX_HOLDERS, pools, key=rank)
    return ReplicasFound(
        asker=question.asker,
        ticket=question.ticket,
        stores=[view.worker for view in found],
        num_blocks=[held.get(view.worker_id, 0) for view in found],
    )


def find_homes(question: FindHomes, conductor: Conductor) -> HomesFound:
    """Return for each block whether a node that stays holds it too, and the nodes that stay."""
    stay = {
        view.worker_id: view
        for view in conductor.views
        if view.role is Role.KVSTORE and not view.draining and view.worker != question.asker
    }
    elsewhere = [
        any(replica.worker.worker_id in stay for replica in conductor.replicas(key))
        for key in question.keys
    ]
    free = {name: view.load.num_free_blocks for name, view in stay.items()}
    most = sorted(stay, key=lambda name: (-free[name], name))[:MAX_HOMES]
    return HomesFound(
        asker=question.asker,
        ticket=question.ticket,
        elsewhere=elsewhere,
        homes=[Home(stay[name].worker, free[name]) for name in most],
    )


class RemovedBlocks:
    """Remembers blocks that were removed from the pool while some nodes were away. These nodes are
    told when they return, so that the blocks do not reappear from their disks.
    """

    def __init__(self, own: WorkerRef) -> None:
        self._own = own
        self._numbers: SharedMap[BlockKey, int] = SharedMap(MAX_REMOVED)
        """Block -> the number of the removal that it was part of."""
        self._last = 0
        self._away: BoundedMap[str, int] = BoundedMap(MAX_AWAY)
        """Node id -> the last removal before the node was lost."""

    def on_removed(self, keys: Sequence[BlockKey], asker: WorkerRef) -> None:
        """Record that `asker` removes these blocks from all nodes that are present."""
        self._last += 1
        credential = client_key(asker)
        for key in keys:
            self._numbers.put(credential, key, self._last)

    def on_lost(self, worker_id: str) -> None:
        """Record that a node is away from now on."""
        self._away[worker_id] = self._last

    def missed(self, hello: WorkerHello) -> Iterator[RemoveBlocks]:
        """Yield the removals that a node which has just joined has missed."""
        since = self._away.pop(hello.worker.worker_id, 0)
        missed = (key for key, number in self._numbers.items() if number > since)
        while keys := list(islice(missed, MESSAGE_BLOCKS)):
            yield RemoveBlocks(asker=self._own, ticket=0, keys=keys)
