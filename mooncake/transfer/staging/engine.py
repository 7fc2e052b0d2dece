"""Moves batches that touch device memory: by hardware where that is possible, otherwise through
pinned host memory.

A slice goes device -> slot -> window -> device; steps at an end that is host memory are left out.
While one slice is on the network the next are being copied. The engine sits above the protocols,
which see batches between host regions. All state lives in one loop; copies and protocols post how
they ended.

A slice transfer takes what it needs in a fixed order (slot, permit, window). One that holds a
window waits only for the network, so a deadlock cannot arise. Whatever ends a slice transfer,
`_leave` gives everything back.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mooncake.transfer.batches import Job
from mooncake.transfer.device import HOST, DeviceMemory
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.regions import RangeRefused, RegionTable
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.direct import DirectMoves, settle_all
from mooncake.transfer.staging.flow import Flow, SliceTransfer, Step, cut_loads
from mooncake.transfer.staging.owner import StagingOwner
from mooncake.transfer.staging.peer import StagingPeer
from mooncake.transfer.staging.slots import Arena, FairSlots, StagingLimits

if TYPE_CHECKING:  # it imports this package
    from mooncake.transfer.router import RoutedTransfer

_LOG = logging.getLogger(__name__)
PROTOCOL = "stage"
"""The name of this protocol in `SegmentRef.endpoints` of an engine with device memory."""


class StagingEngine:
    """Batches that touch device memory, at our end or at the peer's."""

    def __init__(
        self,
        credentials: Credentials,
        table: RegionTable,
        carrier: RoutedTransfer,
        limits: StagingLimits,
        listen: ListenAddress,
    ) -> None:
        """Prepare to listen at `listen` once there is device memory here. No thread runs before one
        is needed.
        """
        self.limits = limits
        self.stats = LinkStats(PROTOCOL)
        self._credentials = credentials
        self._table = table
        self._carrier = carrier
        self._listen = listen
        self._arena = Arena(table, limits)
        self._slots = FairSlots(limits.num_slots)
        self._flows: dict[int, Flow] = {}
        self.peers: PeerDirectory[StagingPeer] = PeerDirectory(
            PROTOCOL,
            credentials,
            lambda key: StagingPeer(key, self),
            lambda peer, reason: self.post(functools.partial(peer.end, reason)),
        )
        self._direct = DirectMoves(carrier, self.post, self._stage, self._settled)
        self._owner: StagingOwner | None = None
        self._loop: IoLoop | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._quiet = threading.Event()

    # ------------------------------------------------------------ any thread

    @property
    def loop(self) -> IoLoop:
        """The loop that all state lives in, made when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = IoLoop(self._table.gates, "transfer-stage")
            return self._loop

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop; from any thread."""
        self.loop.post(call)

    @property
    def in_use(self) -> bool:
        """True if this engine has been used."""
        return self._loop is not None

    @property
    def endpoint(self) -> str | None:
        """The endpoint at which peers ask for windows; None if there is no device memory."""
        if self._owner is None:
            return None
        return self._listen.endpoint(self._owner.port)

    def open(self, memory: DeviceMemory) -> None:
        """Get ready to copy this memory; from any thread. Raises TransferError, or ConfigError when
        the host cannot be bound.
        """
        self._arena.open(memory)
        loop = self.loop
        with self._lock:
            if self._owner is None:
                self._owner = StagingOwner(
                    self._listen, self._credentials, self._table, self._arena, loop,
                    self._carrier.fence,
                )  # fmt: skip

    def takes(self, job: Job) -> bool:
        """Return whether device memory may be at one end of `job`; from any thread."""
        return PROTOCOL in job.peer.endpoints or (
            self._owner is not None
            and any(self._table.get_device(op.local_region) is not None for op in job.ops)
        )

    def start(self, job: Job) -> None:
        """Move a checked batch; from any thread, never waits."""
        self.loop.post(functools.partial(self._begin, job))

    def fence(self, grant: int) -> Fence:
        """Return OPEN while a window is copied to the device by this grant; from any thread."""
        owner = self._owner
        return Fence.OPEN if owner is not None and owner.is_landing(grant) else Fence.CLOSED

    def stop(self, job: Job) -> None:
        """Bring a stopped job to its end; from any thread."""
        if self._loop is not None:
            self._loop.post(functools.partial(self._on_stop, job))

    def close(self) -> None:
        """Refuse peers and begin to end everything. Close the protocols next, then call `join`."""
        if self._loop is not None:
            self._loop.post(self._close)

    def join(self) -> None:
        """Wait until nothing is in hand any more, then release all memory."""
        loop = self._loop
        if loop is None:
            return
        loop.post(self._look_quiet)
        if not self._quiet.wait(self.limits.fence_s):
            _LOG.warning("staging ends while copies still run")
        loop.close()
        self._arena.close()

    # ------------------------------------------------------------ which way a batch goes

    def _begin(self, job: Job) -> None:
        if self._closed:
            job.stop("the transfer engine is closed")
            return
        if PROTOCOL not in job.peer.endpoints:
            self._route(Flow(job, None))
            return
        try:
            peer = self.peers.open(job.peer)
        except PeerUnreachable as error:
            job.stop(f"{job.peer.engine_id} cannot be reached: {error.message}")
            return
        peer.learn(
            {op.remote_region for op in job.ops},
            functools.partial(self._route, Flow(job, peer)),
            lambda reason: job.stop(f"{peer.engine_id} cannot be reached: {reason}"),
        )

    def _route(self, flow: Flow) -> None:
        """Choose how to move a batch, now that it is known which regions lie on devices."""
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
        """Begin what can begin. Each flow asks for one thing at a time, so that all have their
        turn.
        """
        job = flow.job
        while flow.waiting and not job.stopped:
            load = flow.waiting[0]
            if load.local is not None:
                self._slots.ask(job.batch_id, functools.partial(self._on_slot, flow))
                return
            if load.remote is not None and flow.peer is not None:
                flow.peer.permits.ask(job.batch_id, functools.partial(self._on_permit, flow, None))
                return
            transfer = self._enter(flow)
            if transfer is not None:
                self._carry(transfer)
        self._settled(flow)

    def _enter(self, flow: Flow) -> SliceTransfer | None:
        """Take the next load in hand. Return None when the job was stopped."""
        load = flow.waiting.popleft()
        if not flow.job.begin():
            return None
        transfer = SliceTransfer(flow, load, time.monotonic())
        flow.transfers.append(transfer)
        return transfer

    def _on_slot(self, flow: Flow, slot: int) -> None:
        transfer = self._enter(flow)
        if transfer is None:
            self._slots.release(slot)
            return
        transfer.slot = slot
        if transfer.is_write:
            self._copy(transfer)
        else:
            self._reach(transfer)
        self._next(flow)

    def _reach(self, transfer: SliceTransfer) -> None:
        """Go on to the peer's end, now that ours is ready."""
        flow = transfer.flow
        if transfer.load.remote is None or flow.peer is None:
            self._carry(transfer)
            return
        transfer.step = Step.PERMIT
        turn = functools.partial(self._on_permit, flow, transfer)
        flow.peer.permits.ask(flow.job.batch_id, turn)

    def _on_permit(self, flow: Flow, transfer: SliceTransfer | None, permit: int) -> None:
        """Ask for a window, for the slice transfer that wanted the permit; if None, for the
        next.
        """
        assert flow.peer is not None
        is_first = transfer is None
        transfer = transfer or self._enter(flow)
        if transfer is None:
            flow.peer.permits.release(permit)
            return
        remote, load, settled = transfer.load.remote, transfer.load, flow.settled
        assert remote is not None
        transfer.permit = permit
        transfer.step = Step.WINDOW
        transfer.ticket = flow.peer.ask(
            lambda ticket: wire.Open(
                ticket, remote, load.remote_ranges, flow.job.op is Op.WRITE, settled, flow.job.grant
            ),
            functools.partial(self._on_answer, transfer),
        )
        if is_first:
            self._next(flow)

    def _on_answer(self, transfer: SliceTransfer, answer: wire.Answer) -> None:
        """Handle an answer about a window. Unless the answer grants it, the peer has it again."""
        if isinstance(answer, wire.Granted):
            transfer.window = answer
            transfer.flow.settled = True
            self._carry(transfer)
            return
        transfer.ticket = None
        job, error = transfer.flow.job, None
        if isinstance(answer, wire.Refused):
            error = f"{job.peer.engine_id} refused: {answer.reason}"
        elif transfer.step is not Step.LANDING:
            error = f"{job.peer.engine_id} took a window back"
        if transfer.step is Step.NETWORK and error is not None:
            job.stop(error)
            self._settled(transfer.flow)  # this stops what carries it
        else:
            self._leave(transfer, error)

    def _carry(self, transfer: SliceTransfer) -> None:
        job, arena, window = transfer.flow.job, self._arena, transfer.window
        transfer.step = Step.NETWORK
        slot = None
        if transfer.slot is not None:
            slot = (arena.region.region_id, arena.offset(transfer.slot))
        there = None if window is None else (window.region_id, window.offset)
        ops = transfer.load.host_ops(slot, there)
        ended = functools.partial(self._on_carried, transfer)
        transfer.inner = self._carrier.carry(
            job.op, job.peer, ops, lambda inner: self.post(lambda: ended(inner)),
            grant=job.grant if window is None else window.grant,
        )  # fmt: skip

    def _on_carried(self, transfer: SliceTransfer, inner: Job) -> None:
        peer = transfer.flow.peer
        transfer.inner = None
        transfer.flow.job.nics |= inner.nics
        if inner.error is not None or transfer.flow.job.stopped:
            self._leave(transfer, inner.error)
        elif not transfer.is_write:
            window = transfer.window
            if window is not None and window.checksum not in (0, self._checksum(transfer)):
                self._leave(transfer, f"{transfer.flow.job.peer.engine_id}: {wire.ALTERED}")
                return
            if peer is not None and transfer.ticket is not None:
                peer.drop(transfer.ticket)
                transfer.ticket = None
            if transfer.slot is not None:
                self._copy(transfer)
            else:
                self._leave(transfer, None)
        elif peer is not None and transfer.ticket is not None:
            transfer.step = Step.LANDING
            remote = transfer.load.remote
            compares = remote is not None and peer.facts(remote).checksums
            peer.land(transfer.ticket, self._checksum(transfer) if compares else 0)
        else:
            self._leave(transfer, None)

    def _checksum(self, transfer: SliceTransfer) -> int:
        """Return the xxh3-64 of the bytes at our end, in the order of the window's bytes; 0 when
        they cannot be read any more.
        """
        pieces = transfer.load.slice
        if transfer.slot is not None:
            return wire.checksum_of([self._arena.view(transfer.slot, pieces.num_bytes)])
        try:
            views, _ = self._table.views(
                (op.local_region, op.local_offset, op.num_bytes) for op in pieces.pieces
            )
        except RangeRefused:
            return 0
        return wire.checksum_of(views)

    def _copy(self, transfer: SliceTransfer) -> None:
        """Copy between our device and the slot, in the direction of the batch."""
        load = transfer.load
        assert load.local is not None
        assert transfer.slot is not None
        transfer.step = Step.COPY
        view = self._arena.view(transfer.slot, load.slice.num_bytes)
        ended = functools.partial(self._on_copied, transfer)
        load.local.copy(
            transfer.is_write,
            load.local_ranges,
            view,
            lambda error: self.post(lambda: ended(error)),
        )

    def _on_copied(self, transfer: SliceTransfer, error: str | None) -> None:
        if error is not None or transfer.flow.job.stopped or not transfer.is_write:
            self._leave(transfer, error)
        else:
            self._reach(transfer)

    def _leave(self, transfer: SliceTransfer, error: str | None) -> None:
        """End a slice transfer, however it went, and give back all that it holds."""
        flow, job = transfer.flow, transfer.flow.job
        flow.transfers.remove(transfer)
        if flow.peer is not None:
            if transfer.ticket is not None:
                flow.peer.drop(transfer.ticket)
            if transfer.permit is not None:
                flow.peer.permits.release(transfer.permit)
        if transfer.slot is not None:
            self._slots.release(transfer.slot)
        if error is None and not job.stopped:
            load, now = transfer.load, time.monotonic()
            nic = load.local.device if load.local is not None else "window"
            self.stats.arrived(
                nic, job.peer.engine_id, load.slice.num_bytes, transfer.started_s, now
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
        """Clean up after a change. Bring what a stopped job has in hand to its end, once, and
        forget a flow when nothing is left of it.
        """
        if flow.job.stopped and not flow.withdrawn:
            flow.withdrawn = True
            self._withdraw(flow)
        if not (flow.transfers or flow.waiting or flow.is_direct):
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
        for transfer in list(flow.transfers):
            if transfer.step in (Step.PERMIT, Step.WINDOW):
                self._leave(transfer, None)
            elif transfer.inner is not None:
                self._carrier.stop(transfer.inner, job.error or "stopped")

    def _insist(self, flow: Flow) -> None:
        """Treat a peer as lost if a stopped job still waits for it."""
        is_landing = any(transfer.step is Step.LANDING for transfer in flow.transfers)
        if flow.peer is not None and (is_landing or (flow.is_direct and flow.direct is None)):
            flow.peer.give_up("no answer in time to a batch that was stopped")

    def _close(self) -> None:
        self._closed = True
        if self._owner is not None:
            self._owner.close()
        for flow in list(self._flows.values()):
            flow.job.stop("the transfer engine is closed")
            self._settled(flow)
        for peer in self.peers.close():
            peer.end("the transfer engine is closed")
        self._look_quiet()

    def _look_quiet(self) -> None:
        """Report when nothing is in hand any more. Look again while copies for peers are in
        hand.
        """
        is_copying = self._owner is not None and self._owner.num_copying > 0
        if self._flows or is_copying:
            self.loop.call_later(0.005, self._look_quiet)
        else:
            self._quiet.set()

    @property
    def num_held(self) -> tuple[int, int, int]:
        """Numbers of our slots held, windows held and windows resting."""
        windows = self._owner.windows if self._owner is not None else FairSlots(0)
        return self._slots.num_held, windows.num_held, windows.num_resting

    @property
    def num_sessions(self) -> int:
        """Number of clients that are connected, or for which a copy is in hand."""
        return self._owner.listener.num_sessions if self._owner is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when a slot or window is lost, or held without a holder. Call it in
        the loop, or when nothing is under way.
        """
        self._slots.check_integrity()
        transfers = [each for flow in self._flows.values() for each in flow.transfers]
        held = [transfer.slot for transfer in transfers if transfer.slot is not None]
        assert len(held) == len(set(held)) == self._slots.num_held, f"slots {held}"
        for peer in self.peers.all():
            peer.permits.check_integrity()
        if self._owner is not None:
            self._owner.check_integrity()
