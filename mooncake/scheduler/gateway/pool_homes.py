"""Answers a draining pool node: which of its blocks are also stored elsewhere, and which nodes have
room for the others. Pure; all answers are hints.
"""

from __future__ import annotations

from mooncake.base import Role
from mooncake.base.pool_messages import FindHomes, Home, HomesFound
from mooncake.scheduler.placement.conductor import Conductor

MAX_HOMES = 16
"""Nodes named in one answer: those with the most free blocks."""


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
