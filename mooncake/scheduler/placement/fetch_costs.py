"""The cost of fetching blocks from each pool node, including the fetches already in progress there.

Owned by the Conductor. Bandwidths are learned from the bytes and seconds that workers report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockSource, WorkerRef
from mooncake.engine.cost import BandwidthEstimate
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.prefill_choice import StoreRun
from mooncake.scheduler.placement.views import InstanceView

LOCAL_COUNTERS = ("fetch_local_bytes", "fetch_local_seconds")
REMOTE_COUNTERS = ("fetch_remote_bytes", "fetch_remote_seconds")
"""Counters of `WorkerLoad` from which the bandwidths are learned."""


class FetchCosts:
    """Local and remote bandwidth, and the number of blocks being fetched from each pool node."""

    def __init__(self, config: SchedulerConfig) -> None:
        latency_s = config.fetch_latency_s
        self._local = BandwidthEstimate(config.local_bytes_per_s, latency_s)
        self._remote = BandwidthEstimate(config.remote_bytes_per_s, latency_s)
        self._blocks_asked: dict[str, int] = {}
        """Store id and epoch -> blocks of fetches that are not known to have ended."""
        self._seen: dict[str, dict[str, float]] = {}
        self.changed: dict[str, None] = {}
        """Ids of stores whose number of blocks asked has changed; cleared by `Pools`."""

    def observe(self, worker_id: str, counters: Mapping[str, float]) -> None:
        """Learn from what a worker has fetched since its last report."""
        seen = self._seen.setdefault(worker_id, {})
        for estimate, names in ((self._local, LOCAL_COUNTERS), (self._remote, REMOTE_COUNTERS)):
            num_bytes, seconds = (counters.get(name, 0.0) - seen.get(name, 0.0) for name in names)
            estimate.observe(num_bytes, seconds)
        self._seen[worker_id] = {
            name: counters[name] for name in (*LOCAL_COUNTERS, *REMOTE_COUNTERS) if name in counters
        }

    def forget(self, worker_id: str) -> None:
        """Drop a lost worker's counters; its successor counts from zero."""
        self._seen.pop(worker_id, None)

    def run(self, store: InstanceView, first: int, num_blocks: int) -> StoreRun:
        """Return the present cost of fetching `num_blocks` blocks, from block `first` on."""
        block_bytes = store.hello.block_bytes
        waiting_bytes = self.blocks_asked(store.worker) * block_bytes
        return StoreRun(
            store=store.worker,
            node_id=store.hello.node_id,
            first=first,
            stop=first + num_blocks,
            remote_s_per_block=block_bytes / self._remote.bytes_per_s,
            remote_fixed_s=self._remote.seconds(max(waiting_bytes, 1)),
            local_s_per_block=block_bytes / self._local.bytes_per_s,
            local_fixed_s=self._local.seconds(max(waiting_bytes, 1)),
        )

    def blocks_asked(self, store: WorkerRef) -> int:
        """Return the number of blocks being fetched from this store."""
        return self._blocks_asked.get(_name(store.worker_id, store.epoch), 0)

    def local_fixed_s(self, waiting_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `StoreRun.local_fixed_s` for many stores at once."""
        return self._local.latency_s + np.maximum(waiting_bytes, 1) / self._local.bytes_per_s

    def block_s(self, block_bytes: int) -> tuple[float, float]:
        """Return the seconds to fetch a block from the own node's pool, and from another node's."""
        return block_bytes / self._local.bytes_per_s, block_bytes / self._remote.bytes_per_s

    def push_s_per_block(self, block_bytes: int) -> float:
        """Return the seconds to push a block to another node."""
        return block_bytes / self._remote.bytes_per_s

    @property
    def bytes_per_s(self) -> tuple[float, float]:
        """The bandwidth from the own node's pool, and from another's."""
        return self._local.bytes_per_s, self._remote.bytes_per_s

    def started(self, sources: Sequence[BlockSource]) -> None:
        """Record that a worker was told to fetch these sources."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            blocks = source.stop - source.first
            self._blocks_asked[name] = self._blocks_asked.get(name, 0) + blocks
            self.changed[source.store.worker_id] = None

    def ended(self, sources: Sequence[BlockSource]) -> None:
        """Undo one `started`."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            self.changed[source.store.worker_id] = None
            left = self._blocks_asked[name] - (source.stop - source.first)
            assert left >= 0, "more fetches ended than were started"
            if left:
                self._blocks_asked[name] = left
            else:
                del self._blocks_asked[name]

    def check_idle(self) -> None:
        """Raise AssertionError when a fetch is recorded although none is in progress."""
        assert not self._blocks_asked, "fetches are recorded that are not in progress"


def _name(worker_id: str, epoch: str) -> str:
    return f"{worker_id}/{epoch}"
