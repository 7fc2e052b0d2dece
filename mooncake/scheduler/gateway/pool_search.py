"""Answers clients of the pool whose own node is not enough: which nodes hold these blocks, and
which other nodes exist. Pure; all answers are hints.
"""

from __future__ import annotations

import heapq
from zlib import crc32

from mooncake.base import Role
from mooncake.base.pool_messages import FindReplicas, ForgetBlocks, ReplicasFound
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.views import InstanceView

MAX_HOLDERS = 16
"""Nodes named in one answer."""


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
