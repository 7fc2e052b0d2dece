"""Transfers between engines of one process, or within one engine, by plain copies.

With a pool without threads it is deterministic: bytes move, and batches end, inside `poll` only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence, Permit
from mooncake.transfer.link_stats import MEMORY, LinkStats
from mooncake.transfer.local.copying import COPY_LIMITS, CopyPool, copy_parts, local_regions
from mooncake.transfer.plan import plan_slices
from mooncake.transfer.regions import (
    Gates,
    HostRegion,
    RangeRefused,
    RegionTable,
    Withdrawable,
    withdrawn,
)


class InprocFabric:
    """The engines of one process that see each other's memory. Pass one to all of them."""

    def __init__(self) -> None:
        self.gates = Gates()
        self._lock = threading.Lock()
        self._tables: dict[str, RegionTable] = {}

    def attach(self, engine_id: str, table: RegionTable) -> None:
        """Make the memory of an engine reachable. Raises ValueError when the id is taken."""
        with self._lock:
            if engine_id in self._tables:
                raise ValueError(f"the transfer engine id {engine_id!r} is taken in this process")
            self._tables[engine_id] = table

    def detach(self, engine_id: str) -> None:
        """Forget an engine."""
        with self._lock:
            self._tables.pop(engine_id, None)

    def find(self, engine_id: str) -> RegionTable | None:
        """Return the memory of an engine of this process, or None."""
        with self._lock:
            return self._tables.get(engine_id)


class InprocBackend:
    """The `Backend` of one engine for peers in its own process."""

    protocol = "inproc"

    def __init__(
        self,
        engine_id: str,
        fabric: InprocFabric,
        table: RegionTable,
        pool: CopyPool,
        router: Router,
    ) -> None:
        self._engine_id = engine_id
        self._fabric = fabric
        self._table = table
        self._pool = pool
        self._router = router
        self.stats = LinkStats(self.protocol)
        self.link_stats = (self.stats,)
        fabric.attach(engine_id, table)

    @property
    def endpoint(self) -> str:
        return self._engine_id

    def reaches(self, peer: SegmentRef) -> bool:
        return self._fabric.find(peer.engine_id) is not None

    def start(self, job: Job) -> None:
        remote = self._fabric.find(job.peer.engine_id)
        if remote is None:
            self._router.decline(job, f"engine {job.peer.engine_id} has left this process")
            return
        regions: dict[int, HostRegion] = {}
        permits: list[Permit] = []
        try:
            for op in job.ops:
                region = remote.find(op.remote_region, op.remote_offset, op.num_bytes)
                regions[op.remote_region] = region
            if job.op is Op.WRITE:
                permits = remote.permits(regions.values(), job.grant)
        except RangeRefused as error:
            job.stop(f"{job.peer.engine_id} refused: {error.message}")
            return
        slices = plan_slices(job.ops, self._pool.num_connections, COPY_LIMITS)
        try:
            local = local_regions(job, self._table)
            held: list[Withdrawable] = [*regions.values(), *local.values(), *permits]
            guard = RegionGuard(held, self.stats, job.peer.engine_id)
            parts = copy_parts(job, slices, local, regions, guard)
        except RangeRefused as error:
            job.stop(error.message)
            return
        self._pool.run(job, parts)

    def stop_sent(self, job: Job) -> None:
        """Do nothing: the copying threads look at the job between steps."""

    def pump(self) -> None:
        self._pool.pump()

    def fence(self, grant: int) -> Fence:
        """Return CLOSED: the gates were passed since, so nothing is in hand."""
        del grant
        return Fence.CLOSED

    def close(self) -> None:
        self._fabric.detach(self._engine_id)


class RegionGuard:
    """The `Guard` of copies between regions of this process, all of which the gates protect."""

    def __init__(self, needed: Sequence[Withdrawable], stats: LinkStats, peer: str) -> None:
        self._needed = needed
        self._stats = stats
        self._peer = peer

    def enter(self, hand: int) -> str | None:
        del hand
        return withdrawn(self._needed)

    def leave(self, hand: int) -> None:
        """Do nothing: the gate shows which copies are in hand."""

    def confirm(self) -> str | None:
        return None

    def arrived(self, num_bytes: int, posted_s: float, now_s: float) -> None:
        self._stats.arrived(MEMORY, self._peer, num_bytes, posted_s, now_s)
