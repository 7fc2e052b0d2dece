"""Copies a run until a given number of nodes hold it. It asks the nodes which of them hold all of
it. Then as many others as are missing pull it from those, and one more for each that could not.

A policy above `PoolClient`. Bytes go from node to node.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base import BlockKey, MooncakeError, WorkerRef
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import BlocksFound, FindBlocks, TakenOver
from mooncake.kvstore.client.calls import Attempt, together
from mooncake.kvstore.client.client import PoolClient

LOOK_SHARE = 0.25
"""Share of the time in which nodes have to say whether they hold the run. A node that does not
answer is left out.
"""


async def replicate(
    client: PoolClient,
    keys: Sequence[BlockKey],
    stores: Sequence[WorkerRef],
    num_nodes: int,
    tenant: str,
    deadline_s: float,
) -> int:
    """Return how many of these nodes hold all of the run `keys` by `deadline_s`."""
    by_s = client.now + (deadline_s - client.now) * LOOK_SHARE
    look = FindBlocks(asker=client.ref, ticket=0, keys=list(keys))
    found = await together(
        [client.request(Attempt(store, by_s), look, BlocksFound) for store in stores]
    )
    sources: list[WorkerRef] = []
    others: list[WorkerRef] = []
    for store, answer in zip(stores, found, strict=True):
        if not isinstance(answer, MooncakeError):
            (others if None in answer.tiers else sources).append(store)
    while sources and others and len(sources) < num_nodes and client.now < deadline_s:
        wanted = num_nodes - len(sources)
        targets, others = others[:wanted], others[wanted:]
        # Half of the time is for those that are asked should one of these fail.
        limit_s = deadline_s - ((deadline_s - client.now) / 2 if others else 0.0)
        pulls = [
            client.request(
                Attempt(target, limit_s),
                Replicate(
                    source=sources[number % len(sources)],
                    keys=list(keys),
                    tenant=tenant,
                    asker=client.ref,
                ),
                TakenOver,
            )
            for number, target in enumerate(targets)
        ]
        for target, taken in zip(targets, await together(pulls), strict=True):
            if not isinstance(taken, MooncakeError) and set(keys) <= set(taken.keys):
                sources.append(target)
    return len(sources)
