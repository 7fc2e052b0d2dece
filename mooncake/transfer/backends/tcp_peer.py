"""One peer engine over TCP, from our side: its lanes, the slices that wait for one, and retries.

A slice whose stream broke goes again on another, but a WRITE only after the peer has confirmed, in
the handshake of a new stream, that nothing of the old stream can reach its memory any more.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.tcp_lane import Lane
from mooncake.transfer.backends.tcp_request import LaneFailure, LaneLimits, LaneState
from mooncake.transfer.batches import Job, Part
from mooncake.transfer.engine import Op
from mooncake.transfer.handshake import MAX_FENCED, ConnectingSide, Credentials
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.plan import SliceLimits, plan_slices
from mooncake.transfer.regions import RegionTable

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """How we talk to one peer."""

    num_lanes: int = 2
    num_failures: int = 3
    """A slice whose stream broke this often fails its batch."""
    fence_s: float = 0.25
    """How long a stopped WRITE waits for the peer's answer, and again for the fence."""
    slices: SliceLimits = field(default_factory=SliceLimits)
    lane: LaneLimits = field(default_factory=LaneLimits)


class TcpPeer:
    """See the module. `put`, `stop_sent` and `close` may be called from any thread."""

    def __init__(
        self,
        engine_id: str,
        address: tuple[str, int],
        credentials: Credentials,
        table: RegionTable,
        loops: Sequence[IoLoop],
        limits: PeerLimits,
        stats: LinkStats,
    ) -> None:
        self.engine_id = engine_id
        self.on_reached: Callable[[], None] = lambda: None
        self.on_refused: Callable[[str], None] = lambda _reason: None
        """Told how attempts to reach the peer ended."""
        self._stats = stats
        self._credentials = credentials
        self._limits = limits
        self._lock = threading.Lock()
        self._queue: deque[Part] = deque()
        self._unfenced: set[str] = set()
        """Broken streams of ours the peer has not been told of."""
        self._awaiting_fence: list[tuple[str, Part]] = []
        """WRITEs still in hand because of such a stream."""
        self._closed = False
        self._reachable = True
        self._lanes = [
            Lane(self, address, table, loops[index % len(loops)], limits.lane)
            for index in range(limits.num_lanes)
        ]

    @property
    def num_connected(self) -> int:
        """Streams that are not idle."""
        return sum(lane.state is not LaneState.IDLE for lane in self._lanes)

    @property
    def is_unused(self) -> bool:
        """No stream, no work, nothing it must be told."""
        to_tell = self._unfenced and self._reachable
        return not (self._queue or self._awaiting_fence or to_tell or self.num_connected)

    def put(self, job: Job) -> None:
        """Queue the slices of `job`, and begin to send in the caller's thread where that helps."""
        slices = plan_slices(job.ops, len(self._lanes), self._limits.slices)
        job.expect(len(slices))
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.extend(Part(job, part) for part in slices)
        if closed:
            job.stop("the transfer engine is closed")
            return
        # What fits one slice goes in the caller's thread: waking a loop for it took a tenth longer.
        # Not while the peer must first be told of a broken stream, which takes a new one.
        is_small = job.num_bytes <= self._limits.slices.target_bytes and not self._unfenced
        if not (is_small and any(lane.try_send() for lane in self._lanes)):
            self._wake(len(slices))

    def _wake(self, num_parts: int) -> None:
        # Those that are connected first: a small batch needs no second stream. One that has to
        # tell of broken streams must connect anew.
        wanted = LaneState.IDLE if self._unfenced else LaneState.READY
        lanes = sorted(self._lanes, key=lambda lane: lane.state is not wanted)
        for lane in lanes[:num_parts]:
            lane.loop.post(lane.wake)

    # ------------------------------------------------- what lanes ask (LaneOwner)

    @property
    def has_work(self) -> bool:
        """Whether slices wait for a stream."""
        return bool(self._queue)

    def take(self) -> Part | None:
        """Return the next part in hand; none while the peer may still apply stale bytes."""
        with self._lock:
            while self._queue and not self._unfenced:
                part = self._queue.popleft()
                if part.job.begin():
                    return part
        return None

    def arrived(self, lane: Lane, num_bytes: int, posted_s: float, now_s: float) -> None:
        """Count a slice that has arrived whole."""
        self._stats.arrived(lane.nic, self.engine_id, num_bytes, posted_s, now_s)

    def new_handshake(self) -> ConnectingSide:
        """Return a handshake that tells the peer of our broken streams."""
        with self._lock:
            fenced = sorted(self._unfenced)[:MAX_FENCED]
        return self._credentials.connect(self.engine_id, fenced)

    def ready(self, fenced: Sequence[str]) -> None:
        """A handshake has been answered: what it told of is over."""
        self._reachable = True
        self.on_reached()
        self._release(lambda connection_id, _part: connection_id in fenced)
        with self._lock:
            self._unfenced.difference_update(fenced)
            num_waiting = len(self._queue)
        if fenced:
            self._wake(num_waiting)

    def _release(self, chosen: Callable[[str, Part], bool]) -> int:
        """Let go of WRITEs that awaited a fence: they go again, or their jobs end."""
        with self._lock:
            held = self._awaiting_fence
            self._awaiting_fence = [entry for entry in held if not chosen(*entry)]
            parts = [part for connection_id, part in held if chosen(connection_id, part)]
            self._queue.extendleft(part for part in reversed(parts) if not part.job.stopped)
        for part in parts:
            part.job.give_back()
        return len(parts)

    def broken(self, lane: Lane, failure: LaneFailure) -> None:
        """Send again what a broken stream carried, or fail it."""
        if self._closed:
            for part in failure.parts:
                part.job.give_back()
            return
        is_loss = bool(failure.parts) or failure.connection_id is None
        if is_loss:
            self._stats.failed(lane.nic, self.engine_id)
            if failure.parts:
                self._stats.retried(lane.nic, self.engine_id, len(failure.parts))
        level = logging.WARNING if is_loss else logging.INFO
        _LOG.log(level, "transfer stream to %s broke: %s", self.engine_id, failure.reason)
        for part in failure.parts:
            part.num_failures += 1
            if part.num_failures >= self._limits.num_failures:
                part.job.stop(f"{self.engine_id}: {failure.reason}")
        reads = [part for part in failure.parts if part.job.op is Op.READ]
        writes = [part for part in failure.parts if part.job.op is Op.WRITE]
        with self._lock:
            if failure.connection_id is not None and writes:
                self._unfenced.add(failure.connection_id)
                self._awaiting_fence += [(failure.connection_id, part) for part in writes]
            self._queue.extendleft(part for part in reversed(reads) if not part.job.stopped)
            has_work = bool(self._queue or self._awaiting_fence)
            others = {other.state for other in self._lanes if other is not lane}
        for part in reads:
            part.job.give_back()
        if failure.connection_id is not None:
            if has_work:
                lane.connect()
        elif LaneState.CONNECTING not in others:
            self._reachable = False
            if self._unfenced or LaneState.READY not in others:
                self.on_refused(failure.reason)
                self._fail(failure.reason)

    def _fail(self, reason: str) -> None:
        """The peer cannot be reached: fail what waits."""
        with self._lock:
            stranded = [*self._queue, *(part for _, part in self._awaiting_fence)]
            self._queue.clear()
        for part in stranded:
            part.job.stop(f"{self.engine_id}: {reason}")
        self._release(lambda _id, _part: True)

    # ---------------------------------------------------------------- stopping

    def stop_sent(self, job: Job) -> None:
        """Bring the parts of a stopped job to an end: READs now, WRITEs when the peer is done."""
        for lane in self._lanes:
            lane.loop.post(functools.partial(self._stop_on, lane, job))
        loop = self._lanes[0].loop
        loop.post(lambda: self._insist_later(loop, job))

    def _stop_on(self, lane: Lane, job: Job) -> None:
        if lane.give_up(job):
            lane.loop.call_later(self._limits.fence_s, lambda: self._break(lane, job))

    def _break(self, lane: Lane, job: Job) -> None:
        if not job.ended and lane.give_up(job):
            lane.abort("no answer in time to a request that was stopped")

    def _insist_later(self, loop: IoLoop, job: Job) -> None:
        if not job.ended:
            loop.call_later(2 * self._limits.fence_s, lambda: self._insist(job))

    def _insist(self, job: Job) -> None:
        if self._release(lambda _id, part: part.job is job):
            _LOG.warning(
                "batch %d to %s ends unconfirmed: the peer does not answer; it will be told to "
                "apply no more when it does",
                job.batch_id,
                self.engine_id,
            )

    def close(self) -> None:
        """Break all streams; what they had in hand is let go."""
        with self._lock:
            self._closed = True
            self._queue.clear()
        for lane in self._lanes:
            lane.loop.post(functools.partial(lane.abort, "closed"))
        self._lanes[0].loop.post(self._release_all)

    def _release_all(self) -> None:
        self._release(lambda _id, _part: True)
