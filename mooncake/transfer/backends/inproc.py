"""Transfer between engines of one process, and of an engine with itself: plain copies.

With a pool without threads it is deterministic: bytes move, and batches end, inside `poll` only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backends.copying import COPY_LIMITS, CopyPool, copy_parts, local_regions
from mooncake.transfer.backends.port import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.link_stats import MEMORY, LinkStats
from mooncake.transfer.notices import Ear
from mooncake.transfer.plan import plan_slices
from mooncake.transfer.regions import Gates, HostRegion, RangeRefused, RegionTable


class InprocFabric:
    """The engines of one process that can see each other. Pass one to all of them."""

    def __init__(self) -> None:
        self.gates = Gates()
        self._lock = threading.Lock()
        self._tables: dict[str, RegionTable] = {}
        self._ears: dict[str, Ear] = {}

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
            self._ears.pop(engine_id, None)

    def listen(self, engine_id: str, ear: Ear) -> None:
        """Have an engine of this process told by `ear` what others have to say."""
        with self._lock:
            self._ears[engine_id] = ear

    def ear_of(self, engine_id: str) -> Ear | None:
        """Return where an engine of this process hears, or None."""
        return self._ears.get(engine_id)

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
        fabric.attach(engine_id, table)

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        return (self.stats,)

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
        try:
            for op in job.ops:
                region = remote.find(op.remote_region, op.remote_offset, op.num_bytes)
                regions[op.remote_region] = region
        except RangeRefused as error:
            job.stop(f"{job.peer.engine_id} refused: {error.message}")
            return
        slices = plan_slices(job.ops, self._pool.num_lanes, COPY_LIMITS)
        try:
            local = local_regions(job, self._table)
            held = [*regions.values(), *local.values()]
            guard = RegionGuard(held, self.stats, job.peer.engine_id)
            parts = copy_parts(job, slices, local, regions, guard)
        except RangeRefused as error:
            job.stop(error.message)
            return
        self._pool.run(job, parts)

    def stop_sent(self, job: Job) -> None:
        """Nothing to do: the copying threads look at the job between steps."""

    def pump(self) -> None:
        self._pool.pump()

    def close(self) -> None:
        self._fabric.detach(self._engine_id)


class RegionGuard:
    """The `Guard` of copies between regions of this process."""

    def __init__(self, regions: list[HostRegion], stats: LinkStats, peer: str) -> None:
        self._regions = regions
        self._stats = stats
        self._peer = peer

    def refusal(self) -> str | None:
        for region in self._regions:
            if not region.alive:
                return f"region {region.region_id} ({region.label}) was unregistered"
        return None

    def confirm(self) -> str | None:
        return None

    def arrived(self, num_bytes: int, posted_s: float, now_s: float) -> None:
        self._stats.arrived(MEMORY, self._peer, num_bytes, posted_s, now_s)
