"""The gateway machine: the one process clients' requests go through. It listens to workers, keeps
the roster, and hands requests to the desk.

Owns the roster and the desk (which owns the requests); choices are the Conductor's. Text, HTTP and
sockets may not go in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from mooncake.base import (
    BlockEvents,
    Drain,
    GenerateRequest,
    IdSource,
    LoadReport,
    PeerLost,
    Role,
    StepOutputs,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.messages import DoubtPeers, GatewayNews
from mooncake.base.pool_messages import FindHolders, FindHomes, ForgetBlocks
from mooncake.rpc.channel import Channel
from mooncake.scheduler.admission import draining
from mooncake.scheduler.balance import RoleChange
from mooncake.scheduler.conductor import Conductor
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.desk import RequestDesk
from mooncake.scheduler.peer_gateways import PeerGateways
from mooncake.scheduler.pool_homes import find_homes
from mooncake.scheduler.pool_search import find_all, find_holders
from mooncake.scheduler.ports import GatewayPorts
from mooncake.scheduler.record import Sink
from mooncake.scheduler.removals import RemovedBlocks
from mooncake.scheduler.role_switching import RoleSwitching
from mooncake.scheduler.roster import Roster
from mooncake.scheduler.status import (
    ClusterStatus,
    GatewayStatus,
    load_status,
    missing_roles,
    pool_status,
    worker_status,
)
from mooncake.telemetry.events import Recorder, WorkerJoined, WorkerLeft, WorkerReported

logger = logging.getLogger(__name__)


class Gateway:
    """The machine between the door and the workers.

    A sink gets `TokensEvent`s in order of position and then exactly one `FinalEvent`; it may call
    `abort` or `submit` from within, and must not raise.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        worker: WorkerRef,
        conductor: Conductor,
        channel: Channel,
        ids: IdSource,
        recorder: Recorder,
        peers: Sequence[str] = (),
    ) -> None:
        """`peers`: addresses of other gateways of the cluster; one is enough to meet them all."""
        self._config = config
        self._own = worker
        self._conductor = conductor
        self._channel = channel
        self._recorder = recorder
        self._roster = Roster(worker, channel, config.heartbeat_timeout_s)
        self._peers = PeerGateways(
            worker, channel, conductor.books, peers, config.heartbeat_timeout_s
        )
        ports = GatewayPorts(worker=worker, channel=channel, ids=ids, recorder=recorder)
        self._desk = RequestDesk(config, ports, conductor, self._roster)
        self._switching = RoleSwitching(config, channel, self._roster, conductor, self._desk)
        self._removed = RemovedBlocks(worker)
        self._draining_since_s: float | None = None

    # ------------------------------------------------------- the door's side

    def submit(self, request: GenerateRequest, sink: Sink, now: float) -> None:
        """Take a request, or refuse it with a final event (REJECTED) before this returns."""
        if self._draining_since_s is not None:
            self._desk.refuse(request, draining(), sink, now)
        else:
            self._desk.submit(request, sink, now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request at its client's wish: its final event (ABORT) comes before this returns,
        and its workers are told to forget it. Unknown or ended ones are ignored.
        """
        self._desk.abort(request_id, now)

    def drain(self, now: float) -> None:
        """Refuse new requests from now on; `idle` says when the old ones have ended."""
        if self._draining_since_s is None:
            logger.info("draining: %d requests to finish", len(self._desk))
            self._draining_since_s = now

    @property
    def idle(self) -> bool:
        """Whether no request is in the house."""
        return len(self._desk) == 0

    def say_goodbye(self) -> None:
        """Tell all that this gateway is gone, so that nobody waits for its silence."""
        gone = PeerLost(worker=self._own)
        self._peers.tell(gone)
        self._roster.broadcast(gone)

    def status(self, now: float) -> ClusterStatus:
        """Return the cluster as it is seen now."""
        views = self._conductor.views
        workers = []
        for member in self._roster.members:
            view = self._conductor.view(member.hello.worker.worker_id)
            if view is not None:  # a client of the pool has none
                workers.append(worker_status(member, view, now))
        is_draining = self._draining_since_s is not None
        missing = missing_roles(views, needs_prefill=self._config.needs_prefill)
        own = GatewayStatus(
            id=self._own.worker_id,
            address=self._own.address,
            state="draining" if is_draining else "up",
            num_inflight=len(self._desk),
        )
        return ClusterStatus(
            ready=not is_draining and not missing,
            draining=is_draining,
            gateways=[own, *self._peers.status(now)],
            missing=missing,
            workers=workers,
            pool=pool_status(views, self._conductor.num_indexed_blocks),
            load=load_status(views, self._desk.states()),
            counters=dict(self._desk.counters),
        )

    # -------------------------------------------------- the supervisor's side

    def worker_lost(self, worker_id: str, now: float, reason: str = "its process died") -> None:
        """A worker is gone: tell the others, and place again what it was doing."""
        hello = self._roster.lose(worker_id, now)
        if hello is None:
            return
        level = logging.INFO if hello.role is Role.CLIENT else logging.WARNING  # they come and go
        logger.log(level, "worker %s (%s) is lost: %s", worker_id, hello.role.value, reason)
        self._peers.tell(PeerLost(worker=hello.worker))
        self._conductor.on_lost(worker_id)
        if hello.role is Role.KVSTORE:
            self._removed.lost(worker_id)
        self._desk.counters["workers_lost"] += 1
        self._recorder.record(
            WorkerLeft(worker_id=worker_id, at_s=now, role=hello.role, reason=reason)
        )
        self._desk.worker_lost(worker_id, now)

    def drain_worker(self, worker_id: str) -> None:
        """Place nothing more on a worker and tell it to finish what it has."""
        member = self._roster.get(worker_id)
        if member is not None:
            member.draining = True
            self._conductor.on_draining(worker_id)
            self._channel.send(member.hello.worker.address, Drain())

    def change_role(self, worker_id: str, role: Role, now: float) -> bool:
        """Have a prefill or decode worker finish what it has and come back in the other role; False
        when there is no such worker, or another is changing.
        """
        return self._switching.begin(RoleChange(worker_id, role), now)

    # --------------------------------------------------------------- machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take one message of a worker; what is not for a gateway, or from a worker that is not
        (any more) a member, is ignored.
        """
        match event:
            case StepOutputs() | LoadReport() | BlockEvents() | DoubtPeers():
                if self._roster.hear(event.worker, now):
                    self._on_member(event, now)
                elif isinstance(event, LoadReport):
                    self._roster.ask_hello(event.worker)
            case WorkerHello():
                self._on_hello(event, now)
            case FindHolders():
                self._channel.send(event.asker.address, find_holders(event, self._conductor))
            case ForgetBlocks():
                self._removed.add(event.keys)
                self._channel.send(event.asker.address, find_all(event, self._conductor))
            case FindHomes():
                self._channel.send(event.asker.address, find_homes(event, self._conductor))
            case PeerLost() if self._roster.live(event.worker):
                # A worker's own last word, so that nobody waits for its heartbeat; or another
                # gateway has given it up.
                self.worker_lost(event.worker.worker_id, now, "it left")
            case PeerLost() if self._peers.leave(event.worker):
                self._forget_gateways(now)
            case GatewayNews() if self._peers.hear(event, now):
                self._forget_gateways(now)  # one that is back is lost as what it was
                gateway_id = event.gateway.worker_id
                logger.info("gateway %s places requests too", gateway_id)
                self._roster.introduce(self._peers.living, now)
                self._recorder.record(
                    WorkerJoined(worker_id=gateway_id, at_s=now, role=Role.GATEWAY, num_blocks=0)
                )

    def tick(self, now: float) -> float | None:
        """Notice silence, deadlines, stalls; place what waits. Returns when to come again."""
        for worker_id in self._roster.silent(now):
            self.worker_lost(worker_id, now, "no heartbeat")
        peers_wake_s = self._peers.tick(now)
        self._forget_gateways(now)
        wakes = (
            self._desk.tick(now),
            self._roster.next_check_s(now),
            peers_wake_s,
            self._switching.tick(now) if self._peers.is_first else None,
        )
        return min((wake for wake in wakes if wake is not None), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when permits, requests, queues and books disagree."""
        self._roster.check_integrity()
        self._peers.check_integrity()
        self._desk.check_integrity()

    def _forget_gateways(self, now: float) -> None:
        """Of gateways that are gone, have workers end what nobody waits for any more."""
        for gateway in self._peers.lost():
            self._roster.broadcast(PeerLost(worker=gateway))
            self._recorder.record(
                WorkerLeft(
                    worker_id=gateway.worker_id, at_s=now, role=Role.GATEWAY, reason="no beat"
                )
            )

    # --------------------------------------------------------------- workers

    def _on_member(
        self, event: StepOutputs | LoadReport | BlockEvents | DoubtPeers, now: float
    ) -> None:
        match event:
            case StepOutputs():
                for output in event.outputs:
                    self._desk.on_output(output, event.worker, now)
            case LoadReport():
                self._on_load(event, now)
            case BlockEvents():
                self._conductor.on_blocks(event)
                self._check_snapshot(event.worker, now)
            case DoubtPeers():
                self._roster.settle_doubts(event.peers, now)

    def _on_hello(self, hello: WorkerHello, now: float) -> None:
        worker = hello.worker
        if self._roster.hear(worker, now):
            self._roster.welcome(worker, now, send_snapshot=True)
            return
        if self._roster.fenced(worker):
            return
        self.worker_lost(worker.worker_id, now, "it was started again")
        reason = self._admit(hello)
        if reason is not None:
            self._roster.refuse(worker, reason)
            return
        self._roster.join(hello, now)
        for missed in self._removed.back(hello) if hello.role is Role.KVSTORE else ():
            self._channel.send(worker.address, missed)
        logger.info("worker %s (%s) is up on %s", worker.worker_id, hello.role.value, hello.host)
        self._recorder.record(
            WorkerJoined(
                worker_id=worker.worker_id, at_s=now, role=hello.role, num_blocks=hello.num_blocks
            )
        )
        self._desk.worker_joined(now)

    def _admit(self, hello: WorkerHello) -> str | None:
        """Return why a worker cannot be used. Nothing is placed on clients of the pool: the
        Conductor need not know them.
        """
        if hello.role is not Role.CLIENT:
            return self._conductor.on_hello(hello)
        layout = self._conductor.layout
        if layout is None or layout.fingerprint == hello.layout_fingerprint:
            return None
        return f"its KVCache layout {hello.layout_fingerprint} is not {layout.fingerprint}"

    def _on_load(self, report: LoadReport, now: float) -> None:
        worker_id = report.worker.worker_id
        self._conductor.on_load(report, now)
        view = self._conductor.view(worker_id)
        if view is None:
            return
        self._recorder.record(
            WorkerReported(
                worker_id=worker_id,
                at_s=now,
                role=view.role,
                load=report.load,
                cost_error_ratio=view.cost.error_ratio,
            )
        )
        self._check_snapshot(report.worker, now)

    def _check_snapshot(self, worker: WorkerRef, now: float) -> None:
        if self._conductor.needs_snapshot(worker.worker_id):
            self._roster.ask_snapshot(worker, now)
