"""Answers to an earlier boot at the same address, which used the same tickets."""

from __future__ import annotations

import msgspec

from mooncake.base import PutGranted, PutStart, packed_places
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.pool_messages import AnyMessage
from tests.support.sim.cluster import LAYOUT, Cluster, request, specs

PLACES = packed_places(LAYOUT, SegmentRef("gone", {}, "gone"), 0, [])


def test_a_late_grant_does_not_end_a_put() -> None:
    cluster = Cluster(specs(1, 1))
    prefill, pool = (cluster.world.workers[name] for name in ("prefill-0", "kvstore-prefill-0"))
    num_late = 0

    def overtake(_source: str, _target: str, message: AnyMessage) -> None:
        """Bring an answer to the earlier boot before the one to this."""
        nonlocal num_late
        if isinstance(message, PutStart) and message.writer.worker_id == "prefill-0":
            num_late += 1
            earlier = msgspec.structs.replace(message.writer, epoch="e0")
            late = PutGranted(
                asker=earlier, ticket=message.ticket, keys=[], places=PLACES,
                store=pool.machine.state().store,
            )  # fmt: skip
            heap = cluster.world.heap
            heap.after(0.0, lambda: prefill.machine.handle(late, heap.now()))

    cluster.world.network.listener = overtake
    cluster.world.submit(request("first", list(range(1, 60))))
    cluster.run(5)
    assert num_late > 0
    assert pool.machine.counters["blocks_put"] == 59 // LAYOUT.block_tokens
