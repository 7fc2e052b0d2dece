"""One peer over RDMA, from the client's side: its keys, queue pairs to its NICs, and our slices.

A slice whose queue pair broke is sent again over another path. A READ is sent at once, because our
own NIC no longer touches the memory. A WRITE waits until the owner has confirmed that its end is
gone too (`RetryQueue`). Lives in the RDMA loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.transfer.batches import Job, Part, plan_slices
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.io_loop import Timer
from mooncake.transfer.net.retries import Breaker, RetryQueue
from mooncake.transfer.net.session import ClientSession, SessionState
from mooncake.transfer.rdma import wire
from mooncake.transfer.rdma.endpoint import Endpoint, EndpointState, Path, Posted
from mooncake.transfer.rdma.nic import Completion, Outcome, WorkRequest
from mooncake.transfer.rdma.paths import PeerPaths
from mooncake.transfer.regions import RangeRefused

if TYPE_CHECKING:
    from mooncake.transfer.rdma.backend import RdmaBackend

_LOG = logging.getLogger(__name__)


_MAX_GRANTS = 4096
"""Grants remembered as good."""


def _grant_of(job: Job) -> int:
    """Return the grant by which a job writes, or 0 if there is none, or the job reads."""
    return job.grant if job.op is Op.WRITE else 0


class RdmaPeer:
    """Moves the slices of jobs to and from one peer."""

    def __init__(self, key: PeerKey, hub: RdmaBackend) -> None:
        """Begin to connect. Raises ConfigError when the endpoint in `key` is malformed."""
        self.engine_id = key.engine_id
        self.paths = PeerPaths(hub, self._open)
        self._hub = hub
        self._waiting: list[Job] = []
        """Jobs whose slices are not cut yet, because keys or the owner's NICs are not known."""
        self._queue = RetryQueue(key.engine_id, hub.limits.num_failures)
        self._keys: dict[int, wire.RegionKeys] = {}
        self._grants: set[int] = set()
        """Grants by which the owner lets us write."""
        self._asked: set[wire.AskRegion | wire.AskGrant] = set()
        self._timer: Timer | None = None
        self._in_line = False
        """True if it waits for room for its first endpoint, and is pumped when there is some."""
        self._broken = "its links are down, or ours"
        """Why the last path broke."""
        self._session: ClientSession[wire.Ask, wire.Answer] = ClientSession(
            key, hub.peers, hub.loop, hub.limits.connect_s, self, wire.CODEC
        )
        self._session.connect()

    def end_if_unused(self) -> bool:
        """End this peer and return True if it has no work and nothing to confirm."""
        busy = self._waiting or self._queue or self._queue.fences
        if busy or not all(endpoint.is_idle for endpoint in self.paths.endpoints.values()):
            return False
        self.end("not used lately")
        return True

    # ------------------------------------------------------------ the owner

    def on_break(self, reason: str, connection_id: str) -> None:
        """Connect again for the slices that are not done; the owner is told to end the broken
        session.
        """
        self._queue.hold_instead(self._queue.fences, connection_id)
        for endpoint in list(self.paths.endpoints.values()):
            if not endpoint.is_idle:
                self._hub.stats.failed(endpoint.path.local, self.engine_id)
            self._queue.hold(connection_id, self._let_go(endpoint))
        self._keys.clear()
        self._grants.clear()
        self._asked.clear()
        fenced = [fence for fence in self._queue.fences if isinstance(fence, str)]
        if self._queue or self._waiting or fenced:
            self._session.connect(fenced)
        else:
            self._session.end(reason)

    def on_welcome(self) -> None:
        """Send again what was carried by the sessions that the owner has now ended."""
        self._queue.confirm(self._queue.fences)

    def on_answer(self, answer: wire.Answer) -> None:
        """Take an answer of the owner. Raises ProtocolError."""
        if isinstance(answer, wire.Inventory):
            self._on_inventory(answer)
        elif isinstance(answer, wire.RegionKeys):
            self._asked.discard(wire.AskRegion(answer.region_id))
            self._keys[answer.region_id] = answer
            self._cut_waiting()
        elif isinstance(answer, wire.GrantGood):
            self._asked.discard(wire.AskGrant(answer.grant))
            if len(self._grants) >= _MAX_GRANTS:
                self._grants.clear()  # those still in use are asked for again
            self._grants.add(answer.grant)
            self._cut_waiting()
        elif isinstance(answer, wire.RegionUnknown):
            self._asked.discard(wire.AskRegion(answer.region_id))
            self._refuse(
                answer.reason,
                lambda ops, _: any(op.remote_region == answer.region_id for op in ops),
            )
        elif isinstance(answer, wire.GrantRefused):
            self._asked.discard(wire.AskGrant(answer.grant))
            self._refuse(answer.reason, lambda _, job: _grant_of(job) == answer.grant)
        elif isinstance(answer, wire.PairClosed):
            self._queue.confirm([answer.pair_id])
        else:
            self._on_pair(answer)
        self.pump()

    def _on_inventory(self, answer: wire.Inventory) -> None:
        if not answer.nics:
            raise ProtocolError("the peer has no NIC")
        self.paths.rank({nic.name: nic.gid for nic in answer.nics})
        self._session.ready()
        self._cut_waiting()

    def _refuse(self, reason: str, needs: Callable[[Sequence[TransferOp], Job], bool]) -> None:
        """Fail the jobs that need what the owner does not give."""
        message = f"{self.engine_id} refused: {reason}"
        for job in self._waiting:
            if needs(job.ops, job):
                job.stop(message)
        self._queue.fail_ready(message, lambda part: needs(part.slice.pieces, part.job))

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
        self._waiting.append(job)
        self._cut_waiting()
        self.pump()

    def _cut_waiting(self) -> None:
        """Cut the jobs whose regions are known into slices; ask for the other regions."""
        if self._session.state is not SessionState.READY:
            return
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if job.stopped:
                continue
            if self._lacks(job, job.ops):
                self._waiting.append(job)
            else:
                self._cut(job)

    def _lacks(self, job: Job, ops: Sequence[TransferOp]) -> bool:
        """Return whether keys of these ops' regions, or the answer to the job's grant, are not
        known. Ask the owner for what is missing.
        """
        regions = {op.remote_region for op in ops} - self._keys.keys()
        asks: list[wire.AskRegion | wire.AskGrant] = [
            wire.AskRegion(region_id) for region_id in sorted(regions)
        ]
        grant = _grant_of(job)
        if grant and grant not in self._grants:
            asks.append(wire.AskGrant(grant))
        for ask in asks:
            if ask not in self._asked:
                self._asked.add(ask)
                self._session.send(ask)
        return bool(asks)

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
            if region.guarded and job.op is Op.WRITE and not job.grant:
                job.stop(
                    f"{self.engine_id} refused: region {op.remote_region} is written to by grants "
                    "only"
                )
                return
        slices = plan_slices(job.ops, 2 * len(self._hub.nics), self._hub.limits.slices)
        self._queue.put(job, slices)

    # ---------------------------------------------------------------- paths

    def pump(self) -> None:
        """Give slices to paths as long as slices wait and a path has room."""
        if self._session.state is not SessionState.READY:
            return
        self._in_line = False
        now = self._hub.now()
        runs: dict[Path, list[Part]] = {}
        held: list[Part] = []
        while (part := self._queue.first()) is not None:
            if self._lacks(part.job, part.slice.pieces):  # keys that were found stale
                held.append(self._queue.pop())
                continue
            endpoint = self.paths.choose(part, runs, now)
            if endpoint is None:
                break
            self._queue.pop()
            if part.job.begin():
                runs.setdefault(endpoint.path, []).append(part)
        self._queue.put_back(held)
        for path, parts in runs.items():
            self._send(self.paths.endpoints[path], parts, now)
        self._look_ahead(now)

    def _open(self, path: Path, breaker: Breaker) -> bool:
        """Begin to connect a path. Return False when our own NIC refuses, or there is no room for
        it.
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
        """If no path is open or opening, call `pump` again when one may be tried, or give up."""
        if not self._queue or self.paths.endpoints or self._asked or self._in_line:
            return
        when = self.paths.next_try_s(now)
        if when is None:
            self._queue.fail_ready(f"{self.engine_id}: no path to the peer works: {self._broken}")
        elif self._timer is None:
            self._timer = self._hub.loop.call_later(max(0.0, when - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()

    # ------------------------------------------------------------- outcomes

    def on_completion(self, endpoint: Endpoint, completion: Completion) -> None:
        """Take the end of requests of one of our endpoints."""
        if completion.outcome is Outcome.ARRIVED:
            self.paths.breaker(endpoint.path).succeeded()
            self._arrived(endpoint, endpoint.complete(completion.work_id))
            return
        self._arrived(endpoint, endpoint.complete_before(completion.work_id))
        culprit = endpoint.first_at(completion.work_id)
        reason = f"{completion.outcome.value} ({completion.detail})"
        if completion.outcome is Outcome.REFUSED and culprit is not None:
            for piece in culprit.slice.pieces:  # the keys may be stale: ask for them again
                self._keys.pop(piece.remote_region, None)
            self._queue.count_failure([culprit], f"{self.engine_id} refused: {reason}")
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
            part.job.finish(nics=(endpoint.path.local,))

    def fail(self, endpoint: Endpoint, reason: str, *, blame: bool = True) -> None:
        """Close a path that broke. `blame` makes it rest before it is tried again. Call `pump`
        afterwards.
        """
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
        self._close(endpoint, reason if blame else None)

    def _close(self, endpoint: Endpoint, failure: str | None = None) -> None:
        """Destroy an endpoint, here and at the owner; `failure` counts against its slices."""
        self._queue.hold(endpoint.serial, self._let_go(endpoint, failure))
        self._session.send(wire.ClosePair(endpoint.serial))

    def _let_go(self, endpoint: Endpoint, failure: str | None = None) -> list[Part]:
        """Destroy our end of an endpoint. Its READs are sent again. Return the WRITEs that it had
        in hand.
        """
        self.paths.endpoints.pop(endpoint.path, None)
        self.paths.breaker(endpoint.path).untried()  # should it have been a trial
        parts = self._hub.close_endpoint(endpoint)
        if parts:
            self._hub.stats.retried(endpoint.path.local, self.engine_id, len(parts))
        if failure is not None:
            self._queue.count_failure(parts, f"{self.engine_id}: {failure}")
        self._queue.again([part for part in parts if part.job.op is Op.READ])
        return [part for part in parts if part.job.op is Op.WRITE]

    def retire(self, endpoint: Endpoint) -> None:
        """Close an idle endpoint to make room."""
        self._close(endpoint)

    # ------------------------------------------------------------- stopping

    def stop_sent(self, job: Job) -> None:
        """Bring a stopped job to an end: it ends soon by itself, or its paths are torn down."""
        self._hub.loop.call_later(self._hub.limits.fence_s, lambda: self._break(job))

    def _break(self, job: Job) -> None:
        if job.ended:
            return
        for endpoint in list(self.paths.endpoints.values()):
            if endpoint.carries(lambda part: part.job is job):
                self.fail(endpoint, "no answer in time to a batch that was stopped", blame=False)
        self.pump()
        self._hub.loop.call_later(self._hub.limits.fence_s, lambda: self._queue.give_up(job))

    def end(self, reason: str) -> None:
        """Close the session. Jobs that have not begun may take another protocol; the others
        fail.
        """
        self._session.end(reason)

    def on_gone(self, reason: str) -> None:
        """Release all jobs. The next request to this peer begins anew."""
        error = f"{self.engine_id}: {reason}"
        self._queue.fail_ready(error)
        stranded = [
            part
            for endpoint in list(self.paths.endpoints.values())
            for part in self._hub.close_endpoint(endpoint)
        ]
        self.paths.endpoints.clear()
        self._queue.fail(stranded, error)
        self._queue.fail_held(error)
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if not job.stopped:
                self._hub.decline(job, reason)
