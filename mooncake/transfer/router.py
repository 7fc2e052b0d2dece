"""Joins several protocols into one transfer engine for the memory of a process.

Bytes are copied within a process, go by shared memory within a host, and else by RDMA or TCP. All
protocols serve the same registered memory. A protocol declines what it cannot reach, and the next
one is tried.
"""

from __future__ import annotations

import logging
import math
import select
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mooncake.base.clock import Clock
from mooncake.base.errors import TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Backend
from mooncake.transfer.batches import MAX_OPEN_BATCHES, BatchTable, Job
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.engine import (
    Asked,
    AskEnded,
    AskerLeft,
    Op,
    Pieces,
    Region,
    TransferBatch,
    TransferDone,
    TransferEvent,
    TransferOp,
)
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkSnapshot, LinkStats
from mooncake.transfer.net.io_loop import IoLoop, Timer
from mooncake.transfer.regions import DeviceRegion, HostRegion, RangeRefused, RegionTable
from mooncake.transfer.staging.engine import PROTOCOL, StagingEngine

if TYPE_CHECKING:
    from mooncake.transfer.tcp.backend import TcpBackend
    from mooncake.transfer.tcp.questions import Questions

_LOG = logging.getLogger(__name__)
QUESTIONS = "questions"
"""The key in `SegmentRef.endpoints` that names the protocol over which an engine takes
questions.
"""
_TICK_S = 0.005
"""Shortest wait for a deadline, in case the driver's clock is slower than real time."""


class RoutedTransfer:
    """A `PolledTransfer`. `submit`, `cancel` and `poll` may be called from any thread."""

    def __init__(self, engine_id: str, host: str, regions: RegionTable, clock: Clock) -> None:
        self._engine_id = engine_id
        self._host = host
        self._regions = regions
        self._clock = clock
        self._batches = BatchTable(clock)
        self._staging: StagingEngine | None = None
        self._backends: list[Backend] = []
        self._asking: TcpBackend | None = None
        self._questions: Questions | None = None
        self._heard: deque[Asked | AskEnded | AskerLeft] = deque()
        self._closers: list[Callable[[], None]] = []
        self._pumps: list[Callable[[], None]] = []
        self._loops: Sequence[IoLoop] = ()
        self._take: Callable[[], bool] | None = None
        self._offering: set[IoLoop] = set()
        """Loops that are about to offer events. Each loop's thread changes only its own entry."""
        self._timer: Timer | None = None
        self._armed_s = math.inf
        """The deadline that the timer is set for."""
        self._closed = False

    def add_backend(self, backend: Backend) -> None:
        """Add a protocol, to be tried after those added before. Call it before first use only."""
        self._backends.append(backend)

    def add_asking_backend(self, backend: TcpBackend) -> None:
        """Add a protocol that questions go by, too."""
        self.add_backend(backend)
        self._asking = backend

    @property
    def backends(self) -> Sequence[Backend]:
        """The protocols, in the order they are tried."""
        return self._backends

    def links(self) -> list[LinkSnapshot]:
        """Return what went over each link, in the order in which protocols are tried."""
        return [link for stats in self._link_stats() for link in stats.snapshot()]

    def counters(self) -> Mapping[str, float]:
        """Return sums over all peers since the start, by name."""
        return {
            name: value for stats in self._link_stats() for name, value in stats.totals().items()
        }

    def _link_stats(self) -> Iterator[LinkStats]:
        yield from (stats for backend in self._backends for stats in backend.link_stats)
        if self._staging is not None and self._staging.in_use:
            yield self._staging.stats

    def add_closer(self, close: Callable[[], None]) -> None:
        """Have `close` called at the end, after all backends, in the order added."""
        self._closers.append(close)

    def add_pump(self, pump: Callable[[], None]) -> None:
        """Have `pump` called by every `poll`."""
        self._pumps.append(pump)

    def add_staging_engine(self, staging_engine: StagingEngine) -> None:
        """Have `staging_engine` move batches that touch device memory; without it none can be
        moved.
        """
        self._staging = staging_engine

    @property
    def staging_engine(self) -> StagingEngine | None:
        """The engine that moves device memory, if there is one."""
        return self._staging

    def use_loops(self, loops: Sequence[IoLoop]) -> None:
        """Check deadlines in the first of `loops` too; without it only `poll` does. All of them
        may hand out events: see `offer_events`.
        """
        self._loops = loops

    @property
    def segment(self) -> SegmentRef:
        endpoints = {backend.protocol: backend.endpoint for backend in self._backends}
        if self._staging is not None and self._staging.endpoint is not None:
            endpoints[PROTOCOL] = self._staging.endpoint
        if self._questions is not None and self._asking is not None:
            endpoints[QUESTIONS] = self._asking.protocol
        return SegmentRef(self._engine_id, endpoints, self._host)

    def allocate(self, num_bytes: int, label: str) -> HostRegion:
        """Return zeroed, page aligned memory that every protocol serves.

        Raises TransferError when there is not enough memory.
        """
        return self._regions.allocate(num_bytes, label)

    def register(self, buffer: memoryview, label: str, *, read_only: bool = False) -> HostRegion:
        """Register existing memory (not served by shared memory, which peers cannot map).

        read_only: refuse peers that want to write to it. Only an engine without RDMA can: a NIC
        asks nobody.

        Raises TransferError unless it is writable and contiguous.
        """
        return self._regions.register(buffer, label, read_only=read_only)

    def register_device(
        self, memory: DeviceMemory, label: str, *, read_only: bool = False
    ) -> DeviceRegion:
        """Register memory that is reached through windows, such as memory that the host cannot
        address.

        read_only: refuse peers that want to write to it. NICs must not reach such memory.

        Raises TransferError when there is not enough host memory to stand before it.
        """
        if self._staging is None:
            raise TransferError(f"{label}: this transfer engine cannot move memory of a device")
        self._staging.open(memory)
        return self._regions.register_device(memory, label, read_only=read_only)

    def unregister(self, region: Region) -> None:
        """Withdraw a region: peers are refused, and on return none of our threads touches it.

        A peer that copies by shared memory may still finish its step of at most 4 MiB.
        """
        self._regions.withdraw(region)

    def lend(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        self._regions.loans.lend(holder, region.region_id, pieces, write=write)

    def take_back(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        self._regions.loans.take_back(holder, region.region_id, pieces, write=write)

    @property
    def num_loans(self) -> int:
        """Number of pieces lent to pool clients now; a piece lent twice counts twice."""
        return self._regions.loans.num_open

    def guard(self, region: Region) -> None:
        known = self._regions.find_any(region.region_id, 0, 0)
        known.guarded = True

    def grant(self) -> int:
        return self._regions.grants.issue()

    def revoke(self, grant: int) -> None:
        self._regions.grants.revoke(grant)

    def fence(self, grant: int) -> Fence:
        self._regions.gates.pass_all()
        states = [backend.fence(grant) for backend in self._backends]
        if self._staging is not None:
            states.append(self._staging.fence(grant))
        return max(states, default=Fence.CLOSED)

    # ------------------------------------------------------------- questions

    def takes_questions(self, peer: SegmentRef) -> bool:
        asking = self._asking
        if asking is None or peer.endpoints.get(QUESTIONS) != asking.protocol:
            return False
        return next((each for each in self._backends if each.reaches(peer)), None) is asking

    def hear_questions(self) -> None:
        self._questions = self._asking.questions if self._asking is not None else None
        if self._questions is not None:
            self._questions.hear(self._hear)

    def _hear(self, event: Asked | AskEnded | AskerLeft) -> None:
        self._heard.append(event)
        self._batches.done.announce()

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        if self._questions is not None:
            self._questions.answer(number, answer, region, pieces)

    def refuse(self, number: int, reason: str) -> None:
        if self._questions is not None:
            self._questions.refuse(number, reason)

    def events(self) -> Sequence[TransferEvent]:
        """Return the batches that ended and the questions that came since the last call."""
        events: list[TransferEvent] = [*self.poll()]
        while self._heard:
            events.append(self._heard.popleft())
        return events

    def offer_events(self, take: Callable[[], bool]) -> None:
        self._take = take
        self._batches.done.bell = self._offer_soon

    def _offer_soon(self) -> bool:
        """Offer events later if this is a loop's thread: once the loop has done its current work,
        because it may hold locks of a connection. Return whether it will.
        """
        loop = IoLoop.here()
        if loop is None or loop not in self._loops:
            return False
        if loop not in self._offering and loop.post_here(partial(self._offer, loop)):
            self._offering.add(loop)
        return loop in self._offering

    def _offer(self, loop: IoLoop) -> None:
        """Offer events, and again after what the machine has posted to the loop meanwhile."""
        assert self._take is not None
        self._offering.discard(loop)
        had_some = True
        while had_some:
            had_some = bool(self._heard) or not self._batches.done.is_empty
            if not self._take():
                self._batches.done.ring()
                return
            if had_some and loop.has_posts:
                self._offer_soon()
                return

    def _ask(self, job: Job) -> None:
        if self._asking is None or not self.takes_questions(job.peer):
            job.stop(f"{job.peer.engine_id} takes no questions from here")
            return
        job.num_tried, job.protocol = len(self._backends), self._asking.protocol
        self._asking.start(job)

    # --------------------------------------------------------------- batches

    def submit(self, batch: TransferBatch) -> int:
        """Start a batch and return its id; an impossible one fails through its event."""
        job = self._batches.open(batch)
        batch_id = job.batch_id
        try:
            for op in batch.ops:
                self._regions.find_any(op.local_region, op.local_offset, op.num_bytes)
                if op.remote_offset < 0:
                    raise RangeRefused(f"remote offset {op.remote_offset} is negative")
            if batch.question and len({op.num_bytes for op in batch.ops}) > 1:
                raise RangeRefused("all pieces of a question must have one size")
        except RangeRefused as error:
            job.stop(error.message)
            return batch_id
        job.set_ops(batch.ops)
        if self._closed:
            job.stop("the transfer engine is closed")
        elif self._batches.num_open > MAX_OPEN_BATCHES:
            job.stop(f"more than {MAX_OPEN_BATCHES} batches are under way")
        elif batch.question:
            self._ask(job)
        elif not job.ops:
            job.expect(0)
        elif self._staging is not None and self._staging.takes(job):
            job.protocol = PROTOCOL
            self._staging.start(job)
        else:
            self.go_on(job)
        if batch.deadline_s is not None and batch.deadline_s < self._armed_s and not job.ended:
            for loop in self._loops[:1]:
                loop.post(self._watch_deadlines)
        return batch_id

    def decline(self, job: Job, reason: str) -> None:
        """Hand `job` to the next backend on its route, because one could not begin it."""
        _LOG.debug("batch %d to %s goes another way: %s", job.batch_id, job.peer.engine_id, reason)
        self._try_next(job, reason)

    # ------------------------------------------------------- for the staging engine

    def go_on(self, job: Job) -> None:
        """Have the protocols move `job`, which touches no device memory."""
        self._try_next(job, "no common protocol")

    def carry(
        self,
        op: Op,
        peer: SegmentRef,
        ops: Sequence[TransferOp],
        on_end: Callable[[Job], None],
        only: str | None = None,
        grant: int = 0,
    ) -> Job:
        """Move checked `ops` by the protocols, or only by the protocol `only`, as a part of a
        batch.
        """
        batch = TransferBatch(op=op, peer=peer, ops=list(ops), grant=grant)
        job = Job(0, batch, self._clock.now(), on_end)
        job.set_ops(ops)
        if only is None:
            self.go_on(job)
        else:
            job.num_tried = len(self._backends)
            next(each for each in self._backends if each.protocol == only).start(job)
        return job

    def reaches(self, peer: SegmentRef, protocol: str) -> bool:
        """Return whether `protocol` exists here and is worth trying."""
        return any(each.protocol == protocol and each.reaches(peer) for each in self._backends)

    # ------------------------------------------------------------------------------

    def _try_next(self, job: Job, reason: str) -> None:
        while job.num_tried < len(self._backends):
            backend = self._backends[job.num_tried]
            job.num_tried += 1
            if backend.reaches(job.peer):
                if not job.stopped:
                    job.protocol = backend.protocol
                    backend.start(job)
                return
        job.stop(f"{job.peer.engine_id} cannot be reached: {reason}")

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop; nothing happens when it has ended."""
        job = self._batches.get(batch_id)
        if job is not None:
            self.stop(job, "cancelled")

    def stop(self, job: Job, reason: str) -> None:
        """Bring a job to its end."""
        job.stop(reason)
        if not job.ended:
            if self._staging is not None:
                self._staging.stop(job)
            for backend in self._backends:
                backend.stop_sent(job)

    def expire(self) -> float | None:
        """Fail the batches past their deadline; return the next deadline, on the driver's clock."""
        for job in self._batches.take_expired(self._clock.now()):
            self.stop(job, f"deadline passed after {self._clock.now() - job.started_s:.3f} s")
        return self._batches.next_deadline_s()

    def _watch_deadlines(self) -> None:
        """Fail the batches that are due and set the timer for the next deadline. Runs in the
        loop.
        """
        next_s = self.expire()
        if next_s is None or self._armed_s <= next_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = next_s
        wait_s = max(next_s - self._clock.now(), _TICK_S)
        self._timer = self._loops[0].call_later(wait_s, self._on_deadline)

    def _on_deadline(self) -> None:
        # First this, then a look at the batches: one that is opened meanwhile is seen, or asks.
        self._timer, self._armed_s = None, math.inf
        self._watch_deadlines()

    def fileno(self) -> int:
        return self._batches.done.fileno()

    def poll(self) -> Sequence[TransferDone]:
        """Return the batches that ended since the last call, without waiting."""
        self.expire()  # before anything more is done for those whose time is up
        for pump in self._pumps:
            pump()
        return self._batches.done.receive()

    def wait(self, timeout_s: float | None = None) -> Sequence[TransferDone]:
        """Return the batches that ended since the last call as soon as there is one; return none
        after `timeout_s`. Callers that have nothing else to do use this.
        """
        done = self.poll()
        if not done:
            poller = select.poll()
            poller.register(self._batches.done.fileno(), select.POLLIN)
            poller.poll(None if timeout_s is None else max(0.0, 1000 * timeout_s))
            done = self.poll()
        return done

    def close(self) -> None:
        """Refuse peers, fail open batches, end all threads, free the memory.

        The endings can still be polled; memory still referred to by the caller stays mapped.
        """
        if self._closed:
            return
        self._closed = True
        for job in self._batches.open_jobs():
            self.stop(job, "the transfer engine is closed")
        if self._staging is not None:
            self._staging.close()
        for backend in self._backends:
            backend.close()
        for close in self._closers:
            close()
        if self._staging is not None:
            self._staging.join()
        self._regions.close()
        self._batches.done.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a batch or a region was lost or kept twice."""
        self._regions.check_integrity()
        self._batches.check_integrity()
        if self._staging is not None:
            self._staging.check_integrity()
