"""One peer engine over RDMA, from our side: its keys, queue pairs to its NICs, slices and retries.

A slice whose queue pair broke goes again by another path: a READ at once, for our own NIC has let
go of the memory; a WRITE when the owner has confirmed that its end is gone as well, so that no late
packet of the first try can land after the second. Lives in the RDMA loop.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.transfer.backends import rdma_wire as wire
from mooncake.transfer.backends.io_loop import IoLoop, Timer
from mooncake.transfer.backends.rdma_endpoint import Endpoint, EndpointState, Path, Posted
from mooncake.transfer.backends.rdma_nic import Completion, Outcome, WorkRequest
from mooncake.transfer.backends.rdma_paths import PathHub, PeerPaths
from mooncake.transfer.backends.rdma_session import VisitorSession
from mooncake.transfer.batches import Job, Part
from mooncake.transfer.engine import Op
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.path_health import Breaker
from mooncake.transfer.plan import plan_slices
from mooncake.transfer.regions import RangeRefused

Visit = VisitorSession[wire.Ask, wire.Answer]
_LOG = logging.getLogger(__name__)


class PeerHub(PathHub, Protocol):
    """What all peers of one engine share (the backend)."""

    loop: IoLoop
    stats: LinkStats

    def now(self) -> float:
        """Seconds of real time."""

    def open_endpoint(self, peer: RdmaPeer, path: Path) -> Endpoint | None:
        """Return a new endpoint if the cap allows; else, if it were the peer's only one, room is
        made and `pump` called then.

        Raises TransferError when the NIC opens none.
        """

    def close_endpoint(self, endpoint: Endpoint) -> list[Part]:
        """Destroy an endpoint; return what it had under way."""

    def touch(self, endpoint: Endpoint) -> None:
        """It is in use."""

    def new_session(self, peer: RdmaPeer, fenced: Sequence[str]) -> Visit:
        """Begin to talk to the owner; its answers come to `peer`. Raises TransferError."""

    def decline(self, job: Job, reason: str) -> None:
        """Nothing of `job` has begun: let it go another way."""

    def reached(self, peer: RdmaPeer) -> None:
        """The owner has let `peer` in."""

    def forget(self, peer: RdmaPeer, refusal: str | None) -> None:
        """Nothing more goes by `peer`; `refusal`: why its owner could not be reached."""


class PeerState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    GONE = "gone"


class RdmaPeer:
    """See the module."""

    def __init__(self, engine_id: str, address: tuple[str, int], hub: PeerHub) -> None:
        self.engine_id = engine_id
        self.address = address
        self.state = PeerState.CONNECTING
        self.paths = PeerPaths(hub, self._open)
        self._hub = hub
        self._waiting: list[Job] = []
        """Jobs none of whose slices are cut: keys or the owner's NICs are not known yet."""
        self._queue: deque[Part] = deque()
        self._keys: dict[int, wire.RegionKeys] = {}
        self._asked: set[int] = set()
        self._closing: dict[int, list[Part]] = {}
        """WRITEs that wait for the owner to close their queue pair, by its serial number."""
        self._unfenced: dict[str, list[Part]] = {}
        """WRITEs of an earlier session, by its connection id."""
        self._timer: Timer | None = None
        self._in_line = False
        """It waits for room for its first endpoint, and is pumped when there is some."""
        self._broken = "its links are down, or ours"
        """Why the last path broke."""
        self._session: Visit | None = None
        self._connect()

    @property
    def is_unused(self) -> bool:
        """No work and nothing to confirm."""
        return not (self._waiting or self._queue or self._closing or self._unfenced) and all(
            endpoint.is_idle for endpoint in self.paths.endpoints.values()
        )

    # ------------------------------------------------------------ the owner

    def _connect(self) -> None:
        try:
            self._session = self._hub.new_session(self, list(self._unfenced))
        except TransferError as error:
            self._hub.loop.post(functools.partial(self.end, error.message, refused=True))

    def on_session_end(self, reason: str) -> None:
        """The control stream broke: everything that went by it must be told again."""
        session, self._session = self._session, None
        if self.state is not PeerState.READY or session is None:
            self.end(reason, refused=True)
            return
        _LOG.info("RDMA control stream to %s broke: %s", self.engine_id, reason)
        self.state = PeerState.CONNECTING
        writes = [part for parts in self._closing.values() for part in parts]
        self._closing = {}
        for endpoint in list(self.paths.endpoints.values()):
            if not endpoint.is_idle:
                self._hub.stats.failed(endpoint.path.local, self.engine_id)
            writes += self._let_go(endpoint, tell=False)
        if writes:
            self._unfenced[session.connection_id] = writes
        self._keys.clear()
        self._asked.clear()
        if self._queue or self._waiting or self._unfenced:
            self._connect()
        else:
            self.end(reason)

    def on_welcome(self) -> None:
        """The owner has ended the earlier sessions it was told of."""
        fenced, self._unfenced = self._unfenced, {}
        for parts in fenced.values():
            self._again(parts)

    def on_answer(self, answer: wire.Answer) -> None:
        """Take what the owner says. Raises ProtocolError."""
        if isinstance(answer, wire.Inventory):
            self._on_inventory(answer)
        elif isinstance(answer, wire.RegionKeys):
            self._asked.discard(answer.region_id)
            self._keys[answer.region_id] = answer
            self._cut_waiting()
        elif isinstance(answer, wire.RegionUnknown):
            self._asked.discard(answer.region_id)
            self._refuse(answer.region_id, answer.reason)
        elif isinstance(answer, wire.PairClosed):
            self._again(self._closing.pop(answer.pair_id, []))
        else:
            self._on_pair(answer)
        self.pump()

    def _on_inventory(self, answer: wire.Inventory) -> None:
        if not answer.nics:
            raise ProtocolError("the peer has no NIC")
        self.paths.rank({nic.name: nic.gid for nic in answer.nics})
        self.state = PeerState.READY
        self._hub.reached(self)
        self._cut_waiting()

    def _refuse(self, region_id: int, reason: str) -> None:
        message = f"{self.engine_id} refused: {reason}"
        for job in self._waiting:
            if any(op.remote_region == region_id for op in job.ops):
                job.stop(message)
        for part in self._queue:
            if any(piece.remote_region == region_id for piece in part.slice.pieces):
                part.job.stop(message)

    def _on_pair(self, answer: wire.PairOpened | wire.PairRefused) -> None:
        for endpoint in self.paths.endpoints.values():
            if endpoint.serial == answer.pair_id:
                break
        else:
            return  # given up in the meantime
        if isinstance(answer, wire.PairRefused):
            self.fail(endpoint, answer.reason)
            return
        try:
            endpoint.pair.connect(answer.owner)
        except TransferError as error:
            self.fail(endpoint, error.message)
            return
        endpoint.state = EndpointState.READY

    # ----------------------------------------------------------------- jobs

    def put(self, job: Job) -> None:
        """Start `job`."""
        if self.state is PeerState.GONE:
            self._hub.decline(job, "the peer has gone")
            return
        self._waiting.append(job)
        self._cut_waiting()
        self.pump()

    def _cut_waiting(self) -> None:
        """Cut the jobs into slices whose regions are known; ask for the others."""
        if self.state is not PeerState.READY:
            return
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if job.stopped:
                continue
            missing = {op.remote_region for op in job.ops} - self._keys.keys()
            if missing:
                self._waiting.append(job)
                self._ask(missing)
            else:
                self._cut(job)

    def _ask(self, region_ids: Iterable[int]) -> None:
        for region_id in sorted(region_ids):
            if region_id not in self._asked and self._session is not None:
                self._asked.add(region_id)
                self._session.send(wire.AskRegion(region_id))

    def _cut(self, job: Job) -> None:
        for op in job.ops:
            region = self._keys[op.remote_region]
            if op.remote_offset + op.num_bytes > region.num_bytes:
                job.stop(
                    f"{self.engine_id} refused: bytes [{op.remote_offset}, "
                    f"{op.remote_offset + op.num_bytes}) lie outside region {op.remote_region} of "
                    f"{region.num_bytes} bytes"
                )
                return
        slices = plan_slices(job.ops, 2 * len(self._hub.nics), self._hub.limits.slices)
        job.expect(len(slices))
        self._queue.extend(Part(job, part) for part in slices)

    # ---------------------------------------------------------------- paths

    def pump(self) -> None:
        """Give slices to paths while both last."""
        if self.state is not PeerState.READY:
            return
        self._in_line = False
        now = self._hub.now()
        runs: dict[Path, list[Part]] = {}
        held: list[Part] = []
        while self._queue:
            part = self._queue[0]
            if part.job.stopped:
                self._queue.popleft()
                continue
            unknown = {p.remote_region for p in part.slice.pieces} - self._keys.keys()
            if unknown:  # keys that were found stale
                held.append(self._queue.popleft())
                self._ask(unknown)
                continue
            endpoint = self.paths.choose(part, runs, now)
            if endpoint is None:
                break
            self._queue.popleft()
            if part.job.begin():
                runs.setdefault(endpoint.path, []).append(part)
        self._queue.extendleft(reversed(held))
        for path, parts in runs.items():
            self._send(self.paths.endpoints[path], parts, now)
        self._look_ahead(now)

    def _open(self, path: Path, breaker: Breaker) -> bool:
        """Begin to connect a path; False when our own NIC will not, or there is no room for one
        more.
        """
        try:
            endpoint = self._hub.open_endpoint(self, path)
        except TransferError as error:
            _LOG.warning("%s", error.message)
            breaker.failed(self._hub.now())
            return False
        if endpoint is None:
            self._in_line = not self.paths.endpoints
            return self._in_line
        breaker.tried()
        self.paths.endpoints[path] = endpoint
        assert self._session is not None
        self._session.send(wire.OpenPair(endpoint.serial, path.remote, endpoint.pair.address))
        timeout = functools.partial(self._open_late, endpoint)
        self._hub.loop.call_later(self._hub.limits.connect_s, timeout)
        return True

    def _open_late(self, endpoint: Endpoint) -> None:
        if endpoint.state is EndpointState.OPENING:
            self.fail(endpoint, "the peer opens no queue pair")
            self.pump()

    def _send(self, endpoint: Endpoint, parts: list[Part], now: float) -> None:
        run: list[tuple[Part, list[WorkRequest]]] = []
        gone: list[tuple[Part, str]] = []
        failure = None
        with self._hub.loop.gate:  # the CPU reads what goes with its request
            for part in parts:
                try:
                    run.append((part, self._requests(endpoint.path, part)))
                except RangeRefused as error:  # our own memory was withdrawn meanwhile
                    gone.append((part, error.message))
            try:
                if run:
                    self._hub.touch(endpoint)
                    endpoint.send(run, now)
            except TransferError as error:
                failure = error.message
        for part, reason in gone:
            part.job.finish(reason)
        if gone:
            self._hub.loop.post(self.pump)  # no completion of theirs will
        if failure is not None:
            self.fail(endpoint, failure)

    def _requests(self, path: Path, part: Part) -> list[WorkRequest]:
        found = []
        for piece in part.slice.pieces:
            local = self._hub.memory.local(piece.local_region, path.local)
            if local is None:
                raise RangeRefused(f"region {piece.local_region} was unregistered")
            keys = self._keys[piece.remote_region]
            found.append(
                WorkRequest(
                    0,
                    part.job.op is Op.WRITE,
                    local[0] + piece.local_offset,
                    local[1],
                    keys.address + piece.remote_offset,
                    keys.rkeys.get(path.remote, 0),  # a NIC it has just lost: nothing arrives
                    piece.num_bytes,
                    False,
                    local[2],
                )
            )
        return found

    def _look_ahead(self, now: float) -> None:
        """Slices wait and no path is up or coming: come again when one may be tried, or give up."""
        if not self._queue or self.paths.endpoints or self._asked or self._in_line:
            return
        when = self.paths.next_try_s(now)
        if when is None:
            self._strand(f"no path to the peer works: {self._broken}")
        elif self._timer is None:
            self._timer = self._hub.loop.call_later(max(0.0, when - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()

    def _strand(self, reason: str) -> None:
        for part in self._queue:
            part.job.stop(f"{self.engine_id}: {reason}")
        self._queue.clear()

    # ------------------------------------------------------------- outcomes

    def on_completion(self, endpoint: Endpoint, completion: Completion) -> None:
        """Requests of one of our endpoints have ended."""
        if completion.outcome is Outcome.ARRIVED:
            self.paths.breaker(endpoint.path).succeeded()
            self._arrived(endpoint, endpoint.complete(completion.work_id))
            return
        self._arrived(endpoint, endpoint.complete_before(completion.work_id))
        culprit = endpoint.first_at(completion.work_id)
        reason = f"{completion.outcome.value} ({completion.detail})"
        if completion.outcome is Outcome.REFUSED and culprit is not None:
            culprit.num_failures += 1
            for piece in culprit.slice.pieces:  # the keys may be stale: ask for them again
                self._keys.pop(piece.remote_region, None)
            if culprit.num_failures >= self._hub.limits.num_failures:
                culprit.job.stop(f"{self.engine_id} refused: {reason}")
            self.fail(endpoint, reason, blame=False)
        elif completion.outcome is Outcome.LOCAL_MEMORY and culprit is not None:
            culprit.job.stop(f"our own memory was unregistered: {reason}")
            self.fail(endpoint, reason, blame=False)
        else:
            self.fail(endpoint, reason)

    def _arrived(self, endpoint: Endpoint, done: Sequence[Posted]) -> None:
        now = self._hub.now()
        for posted in done:
            part = posted.part
            self._hub.stats.arrived(
                endpoint.path.local, self.engine_id, part.slice.num_bytes, posted.posted_s, now
            )
            part.job.finish()

    def fail(self, endpoint: Endpoint, reason: str, *, blame: bool = True) -> None:
        """A path broke; with `blame` it rests before it is tried again. `pump` afterwards."""
        if endpoint.state is EndpointState.CLOSED:
            return
        _LOG.warning(
            "RDMA path %s to %s of %s broke: %s",
            endpoint.path.local,
            endpoint.path.remote,
            self.engine_id,
            reason,
        )
        if blame:
            self._broken = reason
            self.paths.breaker(endpoint.path).failed(self._hub.now())
            self._hub.stats.failed(endpoint.path.local, self.engine_id)
        self._let_go(endpoint, tell=True, penalty=blame, reason=reason)

    def _let_go(
        self, endpoint: Endpoint, *, tell: bool, penalty: bool = False, reason: str = ""
    ) -> list[Part]:
        """Destroy an endpoint; READs go again. Return the WRITEs, which wait for the owner."""
        self.paths.endpoints.pop(endpoint.path, None)
        self.paths.breaker(endpoint.path).untried()  # should it have been a trial
        parts = self._hub.close_endpoint(endpoint)
        if parts:
            self._hub.stats.retried(endpoint.path.local, self.engine_id, len(parts))
        for part in parts if penalty else ():
            part.num_failures += 1
            if part.num_failures >= self._hub.limits.num_failures:
                part.job.stop(f"{self.engine_id}: {reason}")
        writes = [part for part in parts if part.job.op is Op.WRITE]
        self._again([part for part in parts if part.job.op is Op.READ])
        if tell and self._session is not None:
            self._closing[endpoint.serial] = writes
            self._session.send(wire.ClosePair(endpoint.serial))
        return writes

    def _again(self, parts: Sequence[Part]) -> None:
        """Nothing of these slices is under way any more: queue them, unless their job stopped."""
        self._queue.extendleft(part for part in reversed(parts) if not part.job.stopped)
        for part in parts:
            part.job.give_back()

    def retire(self, endpoint: Endpoint) -> None:
        """Close an idle endpoint to make room."""
        self._let_go(endpoint, tell=True)

    # ------------------------------------------------------------- stopping

    def stop_sent(self, job: Job) -> None:
        """Bring a stopped job to an end: soon by itself, else by tearing its paths down."""
        self._hub.loop.call_later(self._hub.limits.fence_s, lambda: self._break(job))

    def _break(self, job: Job) -> None:
        if job.ended:
            return
        for endpoint in list(self.paths.endpoints.values()):
            if endpoint.carries(lambda part: part.job is job):
                self.fail(endpoint, "no answer in time to a batch that was stopped", blame=False)
        self.pump()
        self._hub.loop.call_later(self._hub.limits.fence_s, lambda: self._insist(job))

    def _insist(self, job: Job) -> None:
        if job.ended:
            return
        _LOG.warning(
            "batch %d to %s ends unconfirmed: the owner does not answer",
            job.batch_id,
            self.engine_id,
        )
        for held in (*self._closing.values(), *self._unfenced.values()):
            mine = [part for part in held if part.job is job]
            held[:] = [part for part in held if part.job is not job]
            self._again(mine)

    def end(self, reason: str, *, refused: bool = False) -> None:
        """Nothing more goes this way: what has not begun may go another, the rest fails. The next
        request begins anew; `refused`: when it may, for this attempt to reach the owner failed.
        """
        if self.state is PeerState.GONE:
            return
        self.state = PeerState.GONE
        if self._session is not None:
            self._session.close()
        self._hub.forget(self, reason if refused else None)
        self._strand(reason)
        stranded = [part for parts in self._closing.values() for part in parts]
        stranded += [part for parts in self._unfenced.values() for part in parts]
        self._closing, self._unfenced = {}, {}
        for endpoint in list(self.paths.endpoints.values()):
            for part in self._hub.close_endpoint(endpoint):
                stranded.append(part)
        self.paths.endpoints.clear()
        for part in stranded:
            part.job.stop(f"{self.engine_id}: {reason}")
            part.job.give_back()
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if not job.stopped:
                self._hub.decline(job, reason)
