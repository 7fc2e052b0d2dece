"""Transfers between engines of one process, or within one engine, by plain copies; and the few
threads that copy memory to memory, for all backends that have both ends mapped.

numpy copies without the interpreter lock, so copies run beside each other and beside Python. With a
pool without threads all is deterministic: bytes move, and batches end, inside `poll` only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.base.kv_layout import SegmentRef
from mooncake.base.threads import VitalThread
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job, Slice, SliceLimits, plan_slices
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence, Permit
from mooncake.transfer.link_stats import MEMORY, LinkStats
from mooncake.transfer.regions import (
    Gates,
    HostRegion,
    RangeRefused,
    RegionTable,
    Withdrawable,
    withdrawn,
)

Bytes = npt.NDArray[np.uint8]
STEP_BYTES = 4 * 2**20
"""Longest copy between two checks (about 200 us). A check looks whether the job continues; it costs
7 us, because the caches are full of copied bytes by then.
"""

MAX_HANDS = 512
"""Threads that may copy for one engine, and one for its callers."""

COPY_LIMITS = SliceLimits(target_bytes=16 * 2**20, min_bytes=4 * 2**20, max_pieces=1024)
INLINE_BYTES = 4 * 2**20
"""A job up to this size is copied by the thread that submits it (about 200 us, without the
interpreter lock). Waking another thread for half of it saves nothing.
"""


class Mapped(Protocol):
    """A region whose memory can be touched here."""

    @property
    def array(self) -> Bytes: ...


class Guard(Protocol):
    """Decides whether the memory at both ends may (still) be touched."""

    def enter(self, hand: int) -> str | None:
        """Return why the step may not run, or None. It is called inside the gate before each step,
        so it must be cheap. The step counts as in `hand` until `leave`; each hand has one step at a
        time.
        """

    def leave(self, hand: int) -> None:
        """Note that a step is over: its hand touches nothing any more."""

    def confirm(self) -> str | None:
        """Return why bytes just copied do not count as arrived, or None. It is called once for each
        part.
        """

    def arrived(self, num_bytes: int, posted_s: float, now_s: float) -> None:
        """Count a part that has arrived whole."""


class CopyPart(msgspec.Struct, frozen=True, eq=False):
    """Copies of one job that one thread does in a row, as (target, source) pairs of equal
    length.
    """

    job: Job
    pairs: Sequence[tuple[Bytes, Bytes]]
    num_bytes: int
    guard: Guard
    posted_s: float


def copy_part(part: CopyPart, gate: threading.Lock, hand: int) -> None:
    """Do one part, in steps. It ends the part in its job whatever happens. Each hand has one
    gate.
    """
    job, guard = part.job, part.guard
    if not job.begin():
        return
    for step in [part.pairs] if part.num_bytes <= STEP_BYTES else steps(part.pairs):
        with gate:
            refusal = guard.enter(hand)
            try:
                if refusal is None and not job.stopped:
                    for target, source in step:
                        np.copyto(target, source)
                    continue
            finally:
                guard.leave(hand)
        if refusal is not None:
            job.finish(refusal)
        else:
            job.give_back()
        return
    error = guard.confirm()
    if error is None:
        guard.arrived(part.num_bytes, part.posted_s, time.monotonic())
    job.finish(error)


def steps(pairs: Sequence[tuple[Bytes, Bytes]]) -> Iterator[list[tuple[Bytes, Bytes]]]:
    """Yield the copies in order, `STEP_BYTES` at a time."""
    step: list[tuple[Bytes, Bytes]] = []
    room = STEP_BYTES
    for target, source in pairs:
        done = 0
        while done < target.size:
            stop = min(target.size, done + room)
            step.append((target[done:stop], source[done:stop]))
            room -= stop - done
            done = stop
            if room == 0:
                yield step
                step, room = [], STEP_BYTES
    if step:
        yield step


def copy_parts(
    job: Job,
    slices: Sequence[Slice],
    local: Mapping[int, HostRegion],
    remote: Mapping[int, Mapped],
    guard: Guard,
) -> list[CopyPart]:
    """Return the parts that do `slices` of `job`; the regions are found and checked."""
    parts = []
    posted_s = time.monotonic()
    for part in slices:
        pairs = []
        for op in part.pieces:
            start = op.local_offset
            here = local[op.local_region].array[start : start + op.num_bytes]
            start = op.remote_offset
            there = remote[op.remote_region].array[start : start + op.num_bytes]
            pairs.append((here, there) if job.op is Op.READ else (there, here))
        parts.append(CopyPart(job, pairs, part.num_bytes, guard, posted_s))
    return parts


def local_regions(job: Job, table: RegionTable) -> dict[int, HostRegion]:
    """Return our regions that `job` names, by id. Raises RangeRefused when one has gone."""
    regions: dict[int, HostRegion] = {}
    for op in job.ops:
        if op.local_region not in regions:
            regions[op.local_region] = table.find(op.local_region, 0, 0)
    return regions


class CopyPool:
    """Copies parts in the order they came, on `num_threads` threads; with 0 threads, inside
    `pump`.
    """

    def __init__(self, gates: Gates, num_threads: int, name: str) -> None:
        self._gates = gates
        self._own_gate = gates.new()
        self._ready = threading.Condition()
        self._parts: deque[CopyPart] = deque()
        self._closed = False
        self._threads = [
            VitalThread(partial(self._run, index + 1), f"{name}-{index}")
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, job: Job, parts: Sequence[CopyPart]) -> None:
        """Start the parts of `job`: small ones at once, else on the threads, else in `pump`."""
        job.expect(len(parts))
        if self._threads and job.num_bytes <= INLINE_BYTES:
            for part in parts:
                copy_part(part, self._own_gate, 0)
            return
        with self._ready:
            if self._closed:
                job.stop("the transfer engine is closed")
                return
            self._parts.extend(parts)
            self._ready.notify(len(parts))

    def pump(self) -> None:
        """Copy all parts queued so far in the caller's thread. Only for a pool without threads."""
        for _ in range(len(self._parts)):
            with self._ready:
                if not self._parts:
                    return
                part = self._parts.popleft()
            copy_part(part, self._own_gate, 0)

    @property
    def num_connections(self) -> int:
        """The number of parts that can be copied at the same time."""
        return max(1, len(self._threads))

    def _run(self, hand: int) -> None:
        gate = self._gates.new()
        try:
            while True:
                with self._ready:
                    while not self._parts and not self._closed:
                        self._ready.wait()
                    if self._closed:
                        return
                    part = self._parts.popleft()
                copy_part(part, gate, hand)
        finally:
            self._gates.forget(gate)

    def close(self) -> None:
        """Finish the steps in hand and end the threads."""
        with self._ready:
            if self._closed:
                return
            self._closed = True
            self._parts.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()
        self._gates.forget(self._own_gate)


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
                raise ValueError(f"another transfer engine here has the id {engine_id!r}")
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
