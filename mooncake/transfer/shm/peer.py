"""One peer on this host, from the client's side: its memory mapped here, and jobs that wait for it.

The connection shows that the owner lives; the owner's pages show which regions are still
registered and which grants were revoked. All are looked at between the steps of every copy, and
while a step writes by a grant, the owner sees it in our hands.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import NUM_SLOTS, revoked
from mooncake.transfer.link_stats import MEMORY, LinkStats
from mooncake.transfer.local.copying import (
    COPY_LIMITS,
    Bytes,
    CopyPool,
    Guard,
    copy_parts,
    local_regions,
)
from mooncake.transfer.memory import map_shared
from mooncake.transfer.net.directory import PeerDirectory
from mooncake.transfer.net.handshake import ConnectingSide, HandshakeRefused
from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, IoLoop, Timer
from mooncake.transfer.net.peer_key import PeerKey
from mooncake.transfer.plan import plan_slices
from mooncake.transfer.regions import HostRegion, RangeRefused, RegionTable, withdrawn
from mooncake.transfer.shm import wire

_LOG = logging.getLogger(__name__)
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


class PeerHub(Protocol):
    """What all peers of one engine share: the backend."""

    table: RegionTable
    pool: CopyPool
    loop: IoLoop
    router: Router
    stats: LinkStats
    peers: PeerDirectory[ShmPeer]


class ShmPeer:
    """One owner on this host. `put` may be called from any thread, all else only in the loop."""

    def __init__(self, key: PeerKey, hub: PeerHub) -> None:
        self.engine_id = key.engine_id
        self.stats = hub.stats
        self.gone: str | None = None
        """Why nothing more goes this way; None while something may."""
        self._key = key
        self._hub = hub
        self._loop = hub.loop
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._poller = select.poll()
        self._handshake: ConnectingSide | None = None
        self._pages: wire.OwnerPages | None = None
        self._regions: dict[int, MappedRegion] = {}
        self._asked: set[int] = set()
        self._waiting: list[Job] = []
        self._timer: Timer | None = None

    # ------------------------------------------------------------ connecting

    def connect(self) -> None:
        """Begin to connect to the owner; once."""
        self._handshake = self._hub.peers.credentials.connect(self.engine_id)
        try:
            sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            sock.connect("\0" + self._key.endpoint.removeprefix("@"))
            self._poller.register(sock, READABLE)
            self._loop.add(sock.fileno(), READABLE, self._on_event)
            sock.send(self._handshake.first_message)
        except OSError as error:
            self.end(f"no shared memory with this peer: {error}")
            return
        self._timer = self._loop.call_later(
            _CONNECT_S, lambda: self.end("the peer does not answer")
        )

    def _on_event(self, events: int) -> None:
        sock = self._sock
        if sock is None:
            return
        fds: list[int] = []
        try:
            data, fds = wire.receive_packet(sock)
            if not data:
                raise ConnectionResetError("the peer has gone")
            if self._pages is None:
                self._on_handshake(sock, data, fds)
            else:
                self._on_answer(data, fds)
        except BlockingIOError:
            if events & HUNG_UP:
                self.end("the peer has gone")
        except (OSError, ProtocolError, TransferError) as error:
            self.end(str(error))
        finally:
            for fd in fds:
                os.close(fd)

    def _on_handshake(self, sock: socket.socket, data: bytes, fds: list[int]) -> None:
        assert self._handshake is not None
        answer = self._handshake.step(data)
        if answer is not None:
            sock.send(answer)
            return
        if len(fds) != wire.NUM_PAGES:
            raise HandshakeRefused("the peer did not send its pages")
        self._pages = wire.OwnerPages(fds)
        self._hub.peers.reached(self._key)
        self._forget_timer()
        self._serve_waiting()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # --------------------------------------------------------------- regions

    def _ask(self, region_id: int) -> None:
        if region_id not in self._asked and self._sock is not None:
            self._asked.add(region_id)
            self._sock.send(wire.CODEC.encode(wire.OpenRegion(region_id)))

    def _on_answer(self, data: bytes, fds: list[int]) -> None:
        answer = wire.CODEC.decode_answer(data)
        self._asked.discard(answer.region_id)
        if isinstance(answer, wire.RegionRefused):
            self._on_refusal(answer)
        else:
            if len(fds) != 1 or answer.slot >= wire.STATE_SLOTS:
                raise ProtocolError("malformed answer about shared memory")
            for region_id in list(self._regions):
                self._live_region(region_id)  # what the owner has let go, so do we
            memory = map_shared(fds[0], answer.num_bytes)
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
        """Start `job`, now if all it needs is mapped, else when it is."""
        if not self._try_start(job):
            self._loop.post(lambda: self._wait(job))

    def _wait(self, job: Job) -> None:
        if self.gone is not None:
            self._hub.router.decline(job, self.gone)
            return
        self._waiting.append(job)
        if self._pages is not None:
            self._serve_waiting()

    def _serve_waiting(self) -> None:
        """Start what can start, ask for the regions the others need."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if job.stopped or self._try_start(job):
                continue
            self._waiting.append(job)
            for region_id in {op.remote_region for op in job.ops}:
                if self._live_region(region_id) is None:
                    self._ask(region_id)

    def _live_region(self, region_id: int) -> MappedRegion | None:
        """Return a region if it is mapped and still registered; let go of one that is not."""
        region = self._regions.get(region_id)
        pages = self._pages
        if region is None or pages is None:
            return None
        if pages.state[region.slot] != region_id:
            self._regions.pop(region_id, None)
            return None
        return region

    def _try_start(self, job: Job) -> bool:
        """Start `job` if all its regions are mapped; a bad range ends it."""
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

    def look(self) -> str | None:
        """Ask the kernel whether the owner still lives; return why not. From any thread."""
        with self._lock:
            if self.gone is not None or self._sock is None:
                return self.gone or "not connected"
            if not self._poller.poll(0):
                return None
            try:
                if self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return None
            except BlockingIOError:
                return None
            except OSError as error:
                return str(error)
        return "the peer has gone"

    def end(self, reason: str) -> None:
        """Hang up; copies in hand stop by themselves."""
        with self._lock:
            if self.gone is not None:
                return
            self.gone = reason
            sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove(sock.fileno())
            sock.close()
        self._forget_timer()
        self._hub.peers.ended(self._key, reason if self._pages is None else None)
        # Copies in hand hold on to the mappings they use; all others go now.
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
        reason = self._peer.look()
        if reason is None:
            return None
        self._peer.stats.failed(MEMORY, self._peer.engine_id)
        return f"{self._peer.engine_id}: {reason}"

    def arrived(self, num_bytes: int, posted_s: float, now_s: float) -> None:
        self._peer.stats.arrived(MEMORY, self._peer.engine_id, num_bytes, posted_s, now_s)
