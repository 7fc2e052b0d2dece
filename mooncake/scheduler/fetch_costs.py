"""What it costs to fetch blocks from each pool node, with the fetches already asked of it.

Owned by the Conductor. Bandwidth is learned from the bytes and seconds that workers report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockSource, WorkerRef
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.cost import BandwidthEstimate
from mooncake.scheduler.prefill_choice import StoreRun
from mooncake.scheduler.views import InstanceView

LOCAL_COUNTERS = ("fetch_local_bytes", "fetch_local_seconds")
REMOTE_COUNTERS = ("fetch_remote_bytes", "fetch_remote_seconds")
"""Counters of `WorkerLoad` the bandwidths are learned from."""


class FetchCosts:
    """Local and remote bandwidth, and the blocks each pool node has been asked for."""

    def __init__(self, config: SchedulerConfig) -> None:
        latency_s = config.fetch_latency_s
        self._local = BandwidthEstimate(config.local_bytes_per_s, latency_s)
        self._remote = BandwidthEstimate(config.remote_bytes_per_s, latency_s)
        self._blocks_asked: dict[str, int] = {}
        """Store id and epoch -> blocks of fetches not known to be over."""
        self._seen: dict[str, dict[str, float]] = {}
        self.changed: dict[str, None] = {}
        """Store ids whose blocks asked have changed; emptied by who keeps a copy of them."""

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
        """The worker is lost; its successor counts from zero."""
        self._seen.pop(worker_id, None)

    def run(self, store: InstanceView, first: int, num_blocks: int) -> StoreRun:
        """Return what fetching `num_blocks` blocks from `first` on from `store` costs now."""
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
        """Return the blocks of fetches from this store that are not known to be over."""
        return self._blocks_asked.get(_name(store.worker_id, store.epoch), 0)

    def local_fixed_s(self, waiting_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `StoreRun.local_fixed_s` of many stores at once."""
        return self._local.latency_s + np.maximum(waiting_bytes, 1) / self._local.bytes_per_s

    def block_s(self, block_bytes: int) -> tuple[float, float]:
        """Return the seconds a block takes from the own node's pool, and from another's."""
        return block_bytes / self._local.bytes_per_s, block_bytes / self._remote.bytes_per_s

    def push_s_per_block(self, block_bytes: int) -> float:
        """Return the seconds to push a block to another node."""
        return block_bytes / self._remote.bytes_per_s

    def started(self, sources: Sequence[BlockSource]) -> None:
        """A worker was told to fetch these."""
        for source in sources:
            name = _name(source.store.worker_id, source.store.epoch)
            blocks = source.stop - source.first
            self._blocks_asked[name] = self._blocks_asked.get(name, 0) + blocks
            self.changed[source.store.worker_id] = None

    def ended(self, sources: Sequence[BlockSource]) -> None:
        """Take one `started` back."""
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
        """Raise AssertionError when a fetch was forgotten."""
        assert not self._blocks_asked, "fetches nobody is waiting for"


def _name(worker_id: str, epoch: str) -> str:
    return f"{worker_id}/{epoch}"
