"""Moves batches that touch device memory: by hardware where it can, else by pinned host memory.

A slice goes device -> slot -> window -> device, of which those on a host are left out; while one is
on the network the next are being copied. It sits above the protocols: they see batches between
host regions. All state lives in one loop; copies and protocols post how they ended.

A passage takes what it needs in one order (slot, permit, window), and whoever holds a window waits
for the network alone, so nobody waits in a circle. Whatever ends a passage, `_leave` gives
everything back.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from mooncake.base.errors import ConfigError
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.rdma_session import VisitorSession
from mooncake.transfer.backends.tcp import parse_endpoint
from mooncake.transfer.batches import Job
from mooncake.transfer.device import HOST, DeviceMemory
from mooncake.transfer.engine import Op
from mooncake.transfer.handshake import Credentials
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.peer_health import PeerHealth
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.arena import Arena, StagingLimits
from mooncake.transfer.staging.direct import Carrier, DirectMoves, settle_all
from mooncake.transfer.staging.flow import Flow, Passage, Step, cut_loads
from mooncake.transfer.staging.owner import StagingOwner
from mooncake.transfer.staging.peer import StagingPeer, Visit
from mooncake.transfer.staging.slots import FairSlots

_LOG = logging.getLogger(__name__)
PROTOCOL = "stage"
"""Its name in `SegmentRef.endpoints`: there is device memory behind this one."""


class Stager:
    """See the module. `takes`, `start`, `stop` and `open` may be called from any thread."""

    def __init__(
        self,
        credentials: Credentials,
        table: RegionTable,
        carrier: Carrier,
        limits: StagingLimits,
        hosts: tuple[str, str],
    ) -> None:
        """`hosts`: where to listen for peers, and what they connect to. Listens only once there is
        device memory, and has no thread before it is needed.
        """
        self.limits = limits
        self.stats = LinkStats(PROTOCOL)
        self._credentials = credentials
        self._table = table
        self._carrier = carrier
        self._bind_host, self._advertise_host = hosts
        self._arena = Arena(table, limits)
        self._slots = FairSlots(limits.num_slots)
        self._flows: dict[int, Flow] = {}
        self._peers: dict[tuple[str, str], StagingPeer] = {}
        self._health = PeerHealth()
        self._direct = DirectMoves(carrier, self.post, self._stage, self._settled)
        self._owner: StagingOwner | None = None
        self._loop: IoLoop | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._quiet = threading.Event()

    # ------------------------------------------------------------ any thread

    @property
    def loop(self) -> IoLoop:
        """Made when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = IoLoop(self._table.gates, "transfer-stage")
            return self._loop

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop."""
        self.loop.post(call)

    @property
    def in_use(self) -> bool:
        """Whether there was anything to do for it yet."""
        return self._loop is not None

    @property
    def endpoint(self) -> str | None:
        """Where peers ask for windows; None where there is no device memory."""
        if self._owner is None:
            return None
        host = self._advertise_host
        return f"[{host}]:{self._owner.port}" if ":" in host else f"{host}:{self._owner.port}"

    def open(self, memory: DeviceMemory) -> None:
        """Be ready for copies of this memory. Raises TransferError, or ConfigError when the host
        cannot be bound.
        """
        self._arena.open(memory)
        loop = self.loop
        with self._lock:
            if self._owner is None:
                self._owner = StagingOwner(
                    self._bind_host, self._credentials, self._table, self._arena, loop
                )

    def takes(self, job: Job) -> bool:
        """Whether device memory may be at one end of `job`."""
        return PROTOCOL in job.peer.endpoints or (
            self._owner is not None
            and any(self._table.get_device(op.local_region) is not None for op in job.ops)
        )

    def start(self, job: Job) -> None:
        """Move a checked batch; never waits."""
        self.loop.post(functools.partial(self._begin, job))

    def stop(self, job: Job) -> None:
        """`job` was told to stop: bring it to its end."""
        if self._loop is not None:
            self._loop.post(functools.partial(self._on_stop, job))

    def close(self) -> None:
        """Refuse peers, begin to end everything. Then the protocols are closed, then `join`."""
        if self._loop is not None:
            self._loop.post(self._close)

    def join(self) -> None:
        """Return when nothing is in hand any more, all memory let go."""
        loop = self._loop
        if loop is None:
            return
        loop.post(self._look_quiet)
        if not self._quiet.wait(self.limits.fence_s):
            _LOG.warning("staging ends with copies in hand")
        loop.close()
        self._arena.close()

    # ------------------------------------------------------------ which way a batch goes

    def _begin(self, job: Job) -> None:
        if self._closed:
            job.stop("the transfer engine is closed")
            return
        endpoint = job.peer.endpoints.get(PROTOCOL)
        if endpoint is None:
            self._route(Flow(job, None))
            return
        refusal = self._health.refusal((endpoint, job.peer.engine_id))
        if refusal is not None:
            job.stop(f"{job.peer.engine_id} cannot be reached: {refusal}")
            return
        try:
            peer = self._peer_at(endpoint, job.peer.engine_id)
        except ConfigError as error:
            job.stop(error.message)
            return
        peer.learn(
            {op.remote_region for op in job.ops},
            functools.partial(self._route, Flow(job, peer)),
            lambda reason: job.stop(f"{peer.engine_id} cannot be reached: {reason}"),
        )

    def _peer_at(self, endpoint: str, engine_id: str) -> StagingPeer:
        """Raises ConfigError when `endpoint` is none."""
        key = (endpoint, engine_id)
        if key not in self._peers:
            self._peers[key] = StagingPeer(engine_id, parse_endpoint(endpoint), self)
        return self._peers[key]

    def new_session(self, peer: StagingPeer, fenced: Sequence[str]) -> Visit:
        connect_s = self.limits.connect_s
        return VisitorSession(peer, self._credentials, fenced, self.loop, connect_s, wire)

    def reached(self, peer: StagingPeer) -> None:
        self._health.reached(self._key(peer))

    def forget(self, peer: StagingPeer, refusal: str | None) -> None:
        key = self._key(peer)
        del self._peers[key]
        if refusal is not None:
            self._health.failed(key, refusal)
        else:
            self._health.unknown(key)

    def _key(self, peer: StagingPeer) -> tuple[str, str]:
        return next(key for key, other in self._peers.items() if other is peer)

    def _route(self, flow: Flow) -> None:
        """It is known which regions are devices': let the protocols have it, or part of it."""
        job, peer = flow.job, flow.peer
        if job.stopped:
            return
        local = {op.local_region: self._table.get_device(op.local_region) for op in job.ops}
        ours = [region for region in local.values() if region is not None]
        facts = [peer.facts(op.remote_region) for op in job.ops] if peer is not None else []
        theirs = {each.region_id: each for each in facts if each.device != HOST}
        if not ours and not theirs:
            self._carrier.go_on(job)
            return
        self._flows[job.batch_id] = flow
        if self._direct.takes(job, ours, theirs.values()):
            self._direct.start(flow, ours, sorted(theirs))
        else:
            self._stage(flow, theirs)

    def _stage(self, flow: Flow, theirs: Iterable[int]) -> None:
        """Cut the batch and begin; `theirs` are the peer's regions that lie on a device."""
        job, slice_bytes, there = flow.job, self.limits.slot_bytes, frozenset(theirs)
        if flow.peer is not None and there:
            slice_bytes = min(slice_bytes, flow.peer.window_bytes)
        get = self._table.get_device
        flow.waiting.extend(cut_loads(job.ops, get, there.__contains__, slice_bytes))
        job.expect(len(flow.waiting))
        regions = map(get, sorted({op.local_region for op in job.ops}))
        memories = [region.memory for region in regions if region is not None]
        begin = functools.partial(self._next, flow)
        if job.op is Op.READ:
            settle_all(memories, self.post, begin)
        else:
            begin()

    # ------------------------------------------------------------ one slice after another

    def _next(self, flow: Flow) -> None:
        """Begin what can begin: each flow asks for one thing at a time, so all have their turn."""
        job = flow.job
        while flow.waiting and not job.stopped:
            load = flow.waiting[0]
            if load.local is not None:
                self._slots.ask(job.batch_id, functools.partial(self._on_slot, flow))
                return
            if load.remote is not None and flow.peer is not None:
                flow.peer.permits.ask(job.batch_id, functools.partial(self._on_permit, flow, None))
                return
            passage = self._enter(flow)
            if passage is not None:
                self._carry(passage)
        self._settled(flow)

    def _enter(self, flow: Flow) -> Passage | None:
        """Take the next load in hand; None when the job was stopped."""
        load = flow.waiting.popleft()
        if not flow.job.begin():
            return None
        passage = Passage(flow, load, time.monotonic())
        flow.passages.append(passage)
        return passage

    def _on_slot(self, flow: Flow, slot: int) -> None:
        passage = self._enter(flow)
        if passage is None:
            self._slots.release(slot)
            return
        passage.slot = slot
        if passage.is_write:
            self._copy(passage)
        else:
            self._reach(passage)
        self._next(flow)

    def _reach(self, passage: Passage) -> None:
        """Our end is ready: on to the peer's."""
        flow = passage.flow
        if passage.load.remote is None or flow.peer is None:
            self._carry(passage)
            return
        passage.step = Step.PERMIT
        turn = functools.partial(self._on_permit, flow, passage)
        flow.peer.permits.ask(flow.job.batch_id, turn)

    def _on_permit(self, flow: Flow, passage: Passage | None, permit: int) -> None:
        """`passage`: which had asked; None = the next of the flow."""
        assert flow.peer is not None
        is_first = passage is None
        passage = passage or self._enter(flow)
        if passage is None:
            flow.peer.permits.release(permit)
            return
        remote, load, settled = passage.load.remote, passage.load, flow.settled
        assert remote is not None
        passage.permit = permit
        passage.step = Step.WINDOW
        passage.ticket = flow.peer.ask(
            lambda ticket: wire.Open(
                ticket, remote, load.remote_ranges, flow.job.op is Op.WRITE, settled
            ),
            functools.partial(self._on_answer, passage),
        )
        if is_first:
            self._next(flow)

    def _on_answer(self, passage: Passage, answer: wire.Answer) -> None:
        """What the peer says about a window; it has it again unless it has just granted it."""
        if isinstance(answer, wire.Granted):
            passage.window = answer
            passage.flow.settled = True
            self._carry(passage)
            return
        passage.ticket = None
        job, error = passage.flow.job, None
        if isinstance(answer, wire.Refused):
            error = f"{job.peer.engine_id} refused: {answer.reason}"
        elif passage.step is not Step.LANDING:
            error = f"{job.peer.engine_id} took a window back"
        if passage.step is Step.NETWORK and error is not None:
            job.stop(error)
            self._settled(passage.flow)  # which stops what carries it
        else:
            self._leave(passage, error)

    def _carry(self, passage: Passage) -> None:
        job, arena, window = passage.flow.job, self._arena, passage.window
        passage.step = Step.NETWORK
        slot = None
        if passage.slot is not None:
            slot = (arena.region.region_id, arena.offset(passage.slot))
        there = None if window is None else (window.region_id, window.offset)
        ops = passage.load.host_ops(slot, there)
        ended = functools.partial(self._on_carried, passage)
        passage.inner = self._carrier.carry(
            job.op, job.peer, ops, lambda inner: self.post(lambda: ended(inner))
        )

    def _on_carried(self, passage: Passage, inner: Job) -> None:
        peer = passage.flow.peer
        passage.inner = None
        if inner.error is not None or passage.flow.job.stopped:
            self._leave(passage, inner.error)
        elif not passage.is_write:
            if peer is not None and passage.ticket is not None:
                peer.drop(passage.ticket)
                passage.ticket = None
            if passage.slot is not None:
                self._copy(passage)
            else:
                self._leave(passage, None)
        elif peer is not None and passage.ticket is not None:
            passage.step = Step.LANDING
            peer.land(passage.ticket)
        else:
            self._leave(passage, None)

    def _copy(self, passage: Passage) -> None:
        """Between our device and the slot, whichever way the batch goes."""
        load = passage.load
        assert load.local is not None
        assert passage.slot is not None
        passage.step = Step.COPY
        view = self._arena.view(passage.slot, load.slice.num_bytes)
        ended = functools.partial(self._on_copied, passage)
        load.local.copy(
            passage.is_write, load.local_ranges, view, lambda error: self.post(lambda: ended(error))
        )

    def _on_copied(self, passage: Passage, error: str | None) -> None:
        if error is not None or passage.flow.job.stopped or not passage.is_write:
            self._leave(passage, error)
        else:
            self._reach(passage)

    def _leave(self, passage: Passage, error: str | None) -> None:
        """A passage is over, however it went: give back all it holds."""
        flow, job = passage.flow, passage.flow.job
        flow.passages.remove(passage)
        if flow.peer is not None:
            if passage.ticket is not None:
                flow.peer.drop(passage.ticket)
            if passage.permit is not None:
                flow.peer.permits.release(passage.permit)
        if passage.slot is not None:
            self._slots.release(passage.slot)
        if error is None and not job.stopped:
            nic = passage.load.local.device if passage.load.local is not None else "window"
            num_bytes = passage.load.slice.num_bytes
            self.stats.arrived(
                nic, job.peer.engine_id, num_bytes, passage.started_s, time.monotonic()
            )
        if error is not None or not job.stopped:
            job.finish(error)
        else:
            job.give_back()
        self._settled(flow)

    # ------------------------------------------------------------ endings

    def _on_stop(self, job: Job) -> None:
        flow = self._flows.get(job.batch_id)
        if flow is not None:
            self._settled(flow)

    def _settled(self, flow: Flow) -> None:
        """Something has changed: bring what a stopped job has in hand to its end, once; forget a
        flow of which nothing is left.
        """
        if flow.job.stopped and not flow.withdrawn:
            flow.withdrawn = True
            self._withdraw(flow)
        if not (flow.passages or flow.waiting or flow.is_direct):
            self._flows.pop(flow.job.batch_id, None)

    def _withdraw(self, flow: Flow) -> None:
        job = flow.job
        flow.waiting.clear()
        self._slots.forget(job.batch_id)
        if flow.peer is not None:
            flow.peer.permits.forget(job.batch_id)
            self.loop.call_later(self.limits.fence_s, functools.partial(self._insist, flow))
        if flow.direct is not None:
            self._carrier.stop(flow.direct, job.error or "stopped")
        for passage in list(flow.passages):
            if passage.step in (Step.PERMIT, Step.WINDOW):
                self._leave(passage, None)
            elif passage.inner is not None:
                self._carrier.stop(passage.inner, job.error or "stopped")

    def _insist(self, flow: Flow) -> None:
        """A stopped job still waits for its peer: that one is taken for lost."""
        is_landing = any(passage.step is Step.LANDING for passage in flow.passages)
        if flow.peer is not None and (is_landing or (flow.is_direct and flow.direct is None)):
            flow.peer.give_up("no answer in time to a batch that was stopped")

    def _close(self) -> None:
        self._closed = True
        if self._owner is not None:
            self._owner.close()
        for flow in list(self._flows.values()):
            flow.job.stop("the transfer engine is closed")
            self._settled(flow)
        for peer in list(self._peers.values()):
            peer.close("the transfer engine is closed")
        self._look_quiet()

    def _look_quiet(self) -> None:
        """Look whether nothing is in hand any more; comes again while copies for peers are."""
        is_copying = self._owner is not None and self._owner.num_copying > 0
        if self._flows or is_copying:
            self.loop.call_later(0.005, self._look_quiet)
        else:
            self._quiet.set()

    @property
    def num_held(self) -> tuple[int, int, int]:
        """Our slots held, windows held, windows resting."""
        windows = self._owner.windows if self._owner is not None else FairSlots(0)
        return self._slots.num_held, windows.num_held, windows.num_resting

    @property
    def num_streams(self) -> int:
        """Visitors whose stream, or whose copies, are here."""
        return self._owner.num_streams if self._owner is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when a slot or window is lost or held by nobody. In the loop, or
        when nothing is under way.
        """
        self._slots.check_integrity()
        passages = [passage for flow in self._flows.values() for passage in flow.passages]
        held = [passage.slot for passage in passages if passage.slot is not None]
        assert len(held) == len(set(held)) == self._slots.num_held, f"slots {held}"
        for peer in self._peers.values():
            peer.permits.check_integrity()
        if self._owner is not None:
            self._owner.check_integrity()
