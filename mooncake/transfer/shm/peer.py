"""A peer on this host, from the client's side: its memory mapped here, and jobs that wait for it.

The connection shows that the owner lives; the owner's pages show which regions are still registered
and which grants were revoked. All of these are checked between the steps of every copy. While a
step writes by a grant, the owner sees that in our hands.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mooncake.base.errors import ProtocolError
from mooncake.transfer.batches import Job, plan_slices
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import NUM_SLOTS, revoked
from mooncake.transfer.link_stats import MEMORY
from mooncake.transfer.local import (
    COPY_LIMITS,
    Bytes,
    Guard,
    copy_parts,
    local_regions,
)
from mooncake.transfer.memory import map_shared
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.session import ClientSession
from mooncake.transfer.regions import HostRegion, RangeRefused, withdrawn
from mooncake.transfer.shm import wire

if TYPE_CHECKING:
    from mooncake.transfer.shm.backend import ShmBackend

_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class MappedRegion:
    """A region of the peer in our address space, as its owner handed it out."""

    region_id: int
    slot: int
    array: Bytes
    guarded: bool

    def check(self, engine_id: str, offset: int, num_bytes: int) -> None:
        """Raise RangeRefused unless the range lies inside what the owner handed out."""
        if offset + num_bytes > self.array.size:
            raise RangeRefused(
                f"{engine_id} refused: bytes [{offset}, {offset + num_bytes}) lie outside region "
                f"{self.region_id} of {self.array.size} bytes"
            )


class ShmPeer:
    """One owner on this host. `put` may be called from any thread, all else only in the loop."""

    def __init__(self, key: PeerKey, hub: ShmBackend) -> None:
        """Prepare to connect. Raises ConfigError when the endpoint in `key` is malformed."""
        self.engine_id = key.engine_id
        self.stats = hub.stats
        self.gone: str | None = None
        """The reason why nothing more goes this way; None while something may."""
        self._hub = hub
        self._pages: wire.OwnerPages | None = None
        self._regions: dict[int, MappedRegion] = {}
        self._asked: set[int] = set()
        self._waiting: list[Job] = []
        self._session: ClientSession[wire.OpenRegion, wire.Answer] = ClientSession(
            key, hub.peers, hub.loop, _CONNECT_S, self, wire.CODEC
        )

    # ------------------------------------------------------------ the owner

    def connect(self) -> None:
        """Begin to connect to the owner; once."""
        self._session.connect()

    def on_welcome(self) -> None:
        """Map the pages that came with the welcome. Raises MooncakeError."""
        with self._session.descriptors(wire.NUM_PAGES) as pages:
            self._pages = wire.OwnerPages(pages)
        self._session.ready()
        self._serve_waiting()

    def on_answer(self, answer: wire.Answer) -> None:
        """Map a region that the owner hands out. Raises MooncakeError."""
        self._asked.discard(answer.region_id)
        if isinstance(answer, wire.RegionRefused):
            self._on_refusal(answer)
        else:
            if answer.slot >= wire.STATE_SLOTS:
                raise ProtocolError("the owner's answer about shared memory is malformed")
            for region_id in list(self._regions):
                self._live_region(region_id)  # unmap what the owner has unmapped
            with self._session.descriptors(1) as [memory_fd]:
                memory = map_shared(memory_fd, answer.num_bytes)
            array = np.frombuffer(memory, dtype=np.uint8, count=answer.num_bytes)
            region = MappedRegion(answer.region_id, answer.slot, array, answer.guarded)
            self._regions[region.region_id] = region
        self._serve_waiting()

    def _on_refusal(self, answer: wire.RegionRefused) -> None:
        wants = [
            job
            for job in self._waiting
            if any(op.remote_region == answer.region_id for op in job.ops)
        ]
        self._waiting = [job for job in self._waiting if job not in wants]
        for job in wants:
            if answer.unshared:
                self._hub.router.decline(job, answer.reason)
            else:
                job.stop(f"{self.engine_id} refused: {answer.reason}")

    # ------------------------------------------------------------------ jobs

    def put(self, job: Job) -> None:
        """Start `job`: now if all regions it needs are mapped, otherwise when they are."""
        if not self._try_start(job):
            self._hub.loop.post(lambda: self._wait(job))

    def _wait(self, job: Job) -> None:
        if self.gone is not None:
            self._hub.router.decline(job, self.gone)
            return
        self._waiting.append(job)
        if self._pages is not None:
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Start the jobs that can start, and ask for the regions that the others need."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if job.stopped or self._try_start(job):
                continue
            self._waiting.append(job)
            for region_id in {op.remote_region for op in job.ops}:
                if self._live_region(region_id) is None and region_id not in self._asked:
                    self._asked.add(region_id)
                    self._session.send(wire.OpenRegion(region_id))

    def _live_region(self, region_id: int) -> MappedRegion | None:
        """Return a region if it is mapped and still registered. Unmap one that is withdrawn."""
        region = self._regions.get(region_id)
        pages = self._pages
        if region is None or pages is None:
            return None
        if pages.state[region.slot] != region_id:
            self._regions.pop(region_id, None)
            return None
        return region

    def _try_start(self, job: Job) -> bool:
        """Start `job` if all its regions are mapped. A bad range ends it."""
        pages = self._pages
        if pages is None or self.gone is not None:
            return False
        regions: dict[int, MappedRegion] = {}
        grant = job.grant if job.op is Op.WRITE else 0
        needs_grant = job.op is Op.WRITE and not grant
        try:
            for op in job.ops:
                region = regions.get(op.remote_region) or self._live_region(op.remote_region)
                if region is None:
                    return False
                region.check(self.engine_id, op.remote_offset, op.num_bytes)
                if needs_grant and region.guarded:
                    raise RangeRefused(
                        f"{self.engine_id} refused: region {op.remote_region} is written to by "
                        "grants only"
                    )
                regions[op.remote_region] = region
            local = local_regions(job, self._hub.table)
        except RangeRefused as error:
            job.stop(error.message)
            return True
        guard = _ShmGuard(self, pages, grant, regions.values(), local.values())
        slices = plan_slices(job.ops, self._hub.pool.num_connections, COPY_LIMITS)
        self._hub.pool.run(job, copy_parts(job, slices, local, regions, guard))
        return True

    # ---------------------------------------------------------------- ending

    def on_break(self, reason: str, _connection_id: str) -> None:
        """End the session. Jobs of which nothing has begun may take another protocol."""
        self._session.end(reason)

    def end(self, reason: str) -> None:
        """Close the session. Copies in hand stop by themselves."""
        self._session.end(reason)

    def on_gone(self, reason: str) -> None:
        """Release all mappings, except those that copies in hand still use."""
        self.gone = reason
        self._regions = {}
        self._pages = None
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if not job.stopped:
                self.stats.failed(MEMORY, self.engine_id)
                self._hub.router.decline(job, reason)


class _ShmGuard(Guard):
    """The `Guard` of copies to or from one peer of this host."""

    __slots__ = ("_grant", "_ours", "_pages", "_peer", "_theirs")

    def __init__(
        self,
        peer: ShmPeer,
        pages: wire.OwnerPages,
        grant: int,
        theirs: Collection[MappedRegion],
        ours: Collection[HostRegion],
    ) -> None:
        self._peer = peer
        self._pages = pages
        self._grant = grant
        self._theirs = theirs
        self._ours = ours

    def enter(self, hand: int) -> str | None:
        pages, grant = self._pages, self._grant
        if grant:
            # Shown before it is looked at: either we see that the grant was revoked, or the owner
            # sees our hand (`resting.FIRST_LOOK_S` later, when all cores have seen both).
            pages.hands[hand] = grant
            if pages.grants[grant % NUM_SLOTS] > grant:
                return f"{self._peer.engine_id} refused: {revoked(grant)}"
        if self._peer.gone is not None:
            self._peer.stats.failed(MEMORY, self._peer.engine_id)
            return f"{self._peer.engine_id}: {self._peer.gone}"
        for theirs in self._theirs:
            if pages.state[theirs.slot] != theirs.region_id:
                return f"{self._peer.engine_id} refused: region {theirs.region_id} was unregistered"
        return withdrawn(self._ours)

    def leave(self, hand: int) -> None:
        if self._grant:
            self._pages.hands[hand] = 0

    def confirm(self) -> str | None:
        reason = self._peer.gone
        if reason is None and self._pages.owner_lives():
            return None
        self._peer.stats.failed(MEMORY, self._peer.engine_id)
        return f"{self._peer.engine_id}: {reason or 'the peer has gone'}"

    def arrived(self, num_bytes: int, posted_s: float, now_s: float) -> None:
        self._peer.stats.arrived(MEMORY, self._peer.engine_id, num_bytes, posted_s, now_s)
