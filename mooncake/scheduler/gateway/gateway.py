"""The gateway machine, through which all requests of clients pass. It receives the workers'
messages, keeps the membership table, and gives requests to the request manager.

Owns the membership table and the request manager (which owns the requests); the Conductor makes the
choices. Text, HTTP and sockets may not go in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from mooncake.base import (
    BlockEvents,
    GenerateRequest,
    IdSource,
    LoadReport,
    PeerLost,
    Role,
    Sink,
    StepOutputs,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.block_events.kv_events import AllBlocksCleared, KvEvent
from mooncake.base.messages import (
    AskCluster,
    Asleep,
    ClusterTold,
    DoubtPeers,
    GatewayNews,
    PeersHeard,
    WeightsChecked,
)
from mooncake.base.pool_messages import FindHomes, FindReplicas, ForgetBlocks
from mooncake.base.rights import client_key
from mooncake.rpc.channel import Channel, PeerEnded
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import Turns
from mooncake.scheduler.gateway.mode_control import ModeControl
from mooncake.scheduler.gateway.peer_gateways import LossAgreement, PeerGateways
from mooncake.scheduler.gateway.pool_search import (
    RemovedBlocks,
    find_all,
    find_homes,
    find_replicas,
)
from mooncake.scheduler.gateway.role_switching import RoleChange, RoleSwitching
from mooncake.scheduler.gateway.scaling_watch import ScalingWatch
from mooncake.scheduler.gateway.status import (
    ClusterStatus,
    GatewayStatus,
    asleep_status,
    load_status,
    missing_roles,
    pool_status,
    replica_status,
    shown_address,
    worker_status,
)
from mooncake.scheduler.membership_table import Member, MembershipTable
from mooncake.scheduler.placement.admission import closed, draining
from mooncake.scheduler.placement.block_feed import BlockFeed
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.requests.attempt_tracker import GatewayPorts
from mooncake.scheduler.requests.request_manager import RequestManager
from mooncake.telemetry.events import Recorder, WorkerJoined, WorkerLeft, WorkerReported

logger = logging.getLogger(__name__)

LEFT = "it left"
"""Why a worker that said goodbye is no member any more."""


class Gateway:
    """Takes requests from the API server and has the workers answer them: a machine.

    A sink gets `RequestOutput`s in order of position and then exactly one `FinalEvent`; it may call
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
        *,
        has_clients: bool = True,
    ) -> None:
        """`peers`: addresses of other gateways of the cluster; one is enough to find them all.
        `has_clients`: False if no request ever comes in, so that no worker has to wait before it
        leaves.
        """
        self.facts = b""
        """The facts that joining processes are told; empty: not known yet."""
        self._has_clients = has_clients
        self._config = config
        self._own = worker
        self._conductor = conductor
        self._channel = channel
        self._recorder = recorder
        self._membership = MembershipTable(worker, channel, config.heartbeat_timeout_s)
        turns = Turns()
        self._peers = PeerGateways(
            worker, channel, conductor.bookings, peers, config.heartbeat_timeout_s, turns
        )
        self._losses = LossAgreement(worker, channel)
        ports = GatewayPorts(worker=worker, channel=channel, ids=ids, recorder=recorder)
        self._request_manager = RequestManager(config, ports, conductor, self._membership, turns)
        self._switching = RoleSwitching(
            config, channel, self._membership, conductor, self._request_manager
        )
        self._peers.demand = self._request_manager.demand
        self.scaling = ScalingWatch(config, conductor, self._request_manager, recorder)
        self.control = ModeControl(
            worker, channel, self._membership, conductor, self._request_manager, self._peers, ids,
            config.heartbeat_timeout_s,
        )  # fmt: skip
        """What operators want of the whole cluster."""
        self._removed = RemovedBlocks(worker)
        self._feed: BlockFeed | None = None
        self._draining_since_s: float | None = None
        self._started_s: float | None = None

    # ------------------------------------------------------- the API server's side

    def submit(self, request: GenerateRequest, sink: Sink, now: float) -> None:
        """Accept a request, or refuse it with a final event (REJECTED) before this returns."""
        if self._draining_since_s is not None:
            self._request_manager.refuse(request, draining(), sink, now)
        elif not self.control.mode.is_open:
            self._request_manager.refuse(request, closed(self.control.mode), sink, now)
        else:
            self._request_manager.submit(request, sink, now)

    @property
    def has_waiting_batch(self) -> bool:
        """True if work of the class batch waits until capacity is idle."""
        return self._request_manager.has_waiting_batch

    def abort(self, request_id: str, now: float) -> None:
        """End a request because its client asked for it. Its final event (ABORT) comes before this
        returns, and its workers are told to abort it. Unknown and ended ids are ignored.
        """
        self._request_manager.abort(request_id, now)

    def publish_blocks(self, publish: Callable[[Sequence[KvEvent]], None]) -> None:
        """From now on publish which blocks of requests can be reused, and which cannot any more.
        Subscribers are first told to forget what a gateway before this one has published.
        """
        publish([AllBlocksCleared()])
        self._feed = self._request_manager.feed = BlockFeed(self._conductor.replicas, publish)

    def drain(self, now: float) -> None:
        """Refuse new requests from now on; `idle` becomes true when the accepted ones end."""
        if self._draining_since_s is None:
            logger.info("this gateway drains: %d requests still run", len(self._request_manager))
            self._draining_since_s = now

    @property
    def idle(self) -> bool:
        """True if no accepted request is left."""
        return len(self._request_manager) == 0

    def say_goodbye(self) -> None:
        """Tell all workers and gateways that this gateway leaves, before they
        notice its silence.
        """
        gone = PeerLost(worker=self._own)
        self._peers.broadcast(gone)
        self._membership.broadcast(gone)

    @property
    def missing(self) -> list[str]:
        """The roles that a request needs and that no worker has."""
        missing = missing_roles(self._conductor.views, needs_prefill=self._config.needs_prefill)
        return [role for role in missing if not self._config.may_be_zero(Role(role))]

    @property
    def ready(self) -> bool:
        """True if a request would be served now. Probes ask it, so it costs little."""
        is_open = self._draining_since_s is None and self.control.mode.is_open
        return is_open and not self.missing

    def status(self, now: float) -> ClusterStatus:
        """Return the present state of the cluster."""
        views = self._conductor.views
        workers = []
        for member in self._membership.members:
            view = self._conductor.view(member.hello.worker.worker_id)
            if view is not None:  # a client of the pool has none
                workers.append(worker_status(member, view, now))
        workers += [asleep_status(each) for each in self.control.asleep]
        mode = self.control.mode
        is_draining = self._draining_since_s is not None
        own = GatewayStatus(
            id=self._own.worker_id,
            address=shown_address(self._own.address),
            state="draining" if is_draining else "up",
            num_inflight=len(self._request_manager),
        )
        return ClusterStatus(
            ready=self.ready,
            draining=is_draining,
            gateways=[own, *self._peers.status(now)],
            missing=self.missing,
            workers=workers,
            pool=pool_status(views, self._conductor.num_indexed_blocks),
            load=load_status(views, self._request_manager.states()),
            replicas=[replica_status(advice) for advice in self.scaling.advice],
            counters=dict(self._request_manager.counters),
            paused=mode.paused,
            sleep_level=mode.sleep_level,
            weights_path=mode.weights.model,
            weights_revision=mode.weights.revision,
        )

    # -------------------------------------------------- the supervisor's side

    def worker_lost(self, worker_id: str, now: float, reason: str = "its process died") -> None:
        """Remove a worker, tell the others, and place its requests again."""
        self.control.on_lost(worker_id)
        member = self._membership.remove(worker_id, now)
        if member is not None:
            self._peers.broadcast(PeerLost(worker=member.hello.worker))
            self._on_removed(member, now, reason)

    def _on_unheard(self, worker_ids: Sequence[str], now: float, reason: str) -> None:
        """Stop using these workers. They are lost when no other gateway hears them either."""
        cut_off = [self._membership.cut_off(worker_id, now) for worker_id in worker_ids]
        members = [member for member in cut_off if member is not None]
        for member in members:
            self.control.on_left(member.hello.worker, now)
        self._losses.open(member.hello.worker for member in members)
        self._agree_on_losses(now)
        for member in members:
            self._on_removed(member, now, reason)

    def _agree_on_losses(self, now: float) -> float | None:
        """Declare the workers lost that no gateway hears. A gateway that hears less than half of
        the workers and no other gateway may itself be cut off, so it declares none lost while it
        knows other gateways. Returns when to ask the others again; None if there is nothing to ask
        now.
        """
        if self._losses.next_s is None:
            return None
        if self._peers.all_silent:
            num_cut_off = sum(not client_key(worker) for worker in self._losses.open_workers)
            if not self._membership.hears_half(num_cut_off, now):
                return None
        for worker in self._losses.take_lost(self._peers.live, now):
            self._membership.declare_lost(worker)
        return self._losses.next_s

    def _on_removed(self, member: Member, now: float, reason: str) -> None:
        """Place the requests of a removed worker on other workers."""
        hello, worker_id = member.hello, member.hello.worker.worker_id
        level = logging.INFO if hello.role is Role.CLIENT else logging.WARNING  # they come and go
        what = "has left" if reason == LEFT else f"is lost: {reason}"
        logger.log(level, "worker %s (%s) %s", worker_id, hello.role.value, what)
        self._conductor.on_lost(worker_id)
        if self._feed is not None and hello.role is not Role.CLIENT:
            self._feed.doubt_all()
        if hello.role is Role.KVSTORE:
            self._removed.on_lost(worker_id)
        self._request_manager.counters["workers_lost"] += 1
        self._recorder.record(
            WorkerLeft(worker_id=worker_id, at_s=now, role=hello.role, reason=reason)
        )
        self._request_manager.worker_lost(worker_id, now, blameless=member.is_ending)

    def change_role(self, worker_id: str, role: Role, now: float) -> bool:
        """Tell a prefill or decode worker to finish its requests and restart in the other role.
        Returns False when there is no such worker, it shares its experts, or another one is
        changing.
        """
        return self._switching.start(RoleChange(worker_id, role), now)

    # --------------------------------------------------------------- machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take one message of a worker. A message that is not for a gateway, or whose sender is not
        a member (any more), is ignored.
        """
        match event:
            case StepOutputs() | LoadReport() | BlockEvents() | DoubtPeers():
                if self._membership.note_alive(event.worker, now):
                    self._on_member(event, now)
                elif isinstance(event, LoadReport):
                    self._losses.close(event.worker)
                    self._membership.request_hello(event.worker)
                elif isinstance(event, DoubtPeers) and event.worker in self._peers.live:
                    self._answer(event, now)
            case PeersHeard() if event.gateway in self._peers.live:
                self._losses.on_answer(event)
            case WorkerHello():
                self._on_hello(event, now)
            case FindReplicas():
                self._channel.send(event.asker.address, find_replicas(event, self._conductor))
            case ForgetBlocks():
                self._removed.on_removed(event.keys, event.asker)
                self._channel.send(event.asker.address, find_all(event, self._conductor))
            case FindHomes():
                self._channel.send(event.asker.address, find_homes(event, self._conductor))
            case Asleep():
                self._on_asleep(event, now)
            case WeightsChecked():
                self.control.on_checked(event)
            case AskCluster() if self.facts:
                self._channel.send(event.asker.address, self._told(event))
            case PeerEnded():
                # Or a firewall between it and us refuses connections.
                self._on_unheard(self._membership.at(event.address), now, "its process ended")
            case PeerLost() if self._membership.is_live(event.worker):
                # A worker says goodbye, or its supervisor knows that its process died. Another
                # gateway's silence with it does not count here.
                self.worker_lost(event.worker.worker_id, now, LEFT)
                self.control.on_left(event.worker, now)
            case PeerLost() if self._peers.on_goodbye(event.worker):
                self._forget_gateways(now)
            case GatewayNews() if self._on_news(event, now):
                self._forget_gateways(now)  # a gateway that is back is lost in its old epoch
                gateway_id = event.gateway.worker_id
                logger.info("gateway %s has joined and places requests, too", gateway_id)
                self._membership.set_gateways(self._peers.live, now)
                self._recorder.record(
                    WorkerJoined(worker_id=gateway_id, at_s=now, role=Role.GATEWAY, num_blocks=0)
                )

    def tick(self, now: float) -> float | None:
        """Check for silent workers, deadlines and stalls, and place pending requests. Returns when
        to call again.
        """
        self._started_s = now if self._started_s is None else self._started_s
        self._on_unheard(self._membership.silent_workers(now), now, "no heartbeat")
        self._peers.mode = self.control.mode
        peers_wake_s = self._peers.tick(now)
        self._forget_gateways(now)
        wakes = (
            self.scaling.tick(now),
            self._agree_on_losses(now),
            self._request_manager.tick(now),
            self._membership.next_check_s(now),
            peers_wake_s,
            self._switching.tick(now) if self._peers.is_first else None,
            self.control.tick(now),
            self._feed.tick(now) if self._feed is not None else None,
        )
        return min((wake for wake in wakes if wake is not None), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when permits, requests, queues and bookings disagree."""
        self._membership.check_integrity()
        self._peers.check_integrity()
        self._request_manager.check_integrity()

    def _forget_gateways(self, now: float) -> None:
        """Tell workers to end the requests of gateways that are lost."""
        for gateway in self._peers.take_lost():
            self._membership.broadcast(PeerLost(worker=gateway))
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
                    self._request_manager.on_output(output, event.worker, now)
            case LoadReport():
                self._on_load(event, now)
            case BlockEvents():
                self._conductor.on_blocks(event)
                is_known = self._conductor.view(event.worker.worker_id) is not None
                if self._feed is not None and is_known:  # a pool client holds no blocks
                    self._feed.on_blocks(event)
                self._check_snapshot(event.worker, now)
            case DoubtPeers():
                self._losses.open(self._membership.missing(event.peers, now))
                self._agree_on_losses(now)

    def _on_news(self, event: GatewayNews, now: float) -> bool:
        """Apply the news of another gateway. Returns True when that gateway is new, or is back."""
        is_new = self._peers.on_news(event, now)
        if event.gateway in self._peers.live:
            self.control.learn(event.mode)
        return is_new

    def _answer(self, question: DoubtPeers, now: float) -> None:
        """Tell another gateway which workers are heard here, once all of them had time to join."""
        if self._started_s is None or now - self._started_s < self._config.heartbeat_timeout_s:
            return
        answer = PeersHeard(gateway=self._own, heard=[], unheard=[])
        for peer in question.peers:
            is_heard = self._membership.hears(peer, now)
            (answer.heard if is_heard else answer.unheard).append(peer)
        self._channel.send(question.worker.address, answer)

    def _on_hello(self, hello: WorkerHello, now: float) -> None:
        worker = hello.worker
        if self._membership.note_alive(worker, now):
            self._membership.welcome(worker, now, send_snapshot=True)
            return
        if self._membership.is_fenced(worker):
            return
        self._losses.close(worker)
        self.worker_lost(worker.worker_id, now, "it was started again")
        if self._membership.is_full and (silent := self._membership.oldest_silent_client()):
            self.worker_lost(silent, now, "it has said nothing, and others came")
        if not self.control.on_hello(hello, now):
            return
        reason = self._admit(hello)
        if reason is not None:
            self._membership.refuse(worker, reason)
            return
        self._membership.join(hello, now)
        for missed in self._removed.missed(hello) if hello.role is Role.KVSTORE else ():
            self._channel.send(worker.address, missed)
        logger.info("worker %s (%s) is up on %s", worker.worker_id, hello.role.value, hello.host)
        self._recorder.record(
            WorkerJoined(
                worker_id=worker.worker_id,
                at_s=now,
                role=hello.role,
                num_blocks=hello.num_blocks,
                node_id=hello.node_id,
            )
        )
        self._request_manager.worker_joined(hello, now)

    def _on_asleep(self, asleep: Asleep, now: float) -> None:
        """Record that an engine sleeps, unless it has woken since it said so: a gateway that stood
        still may read its hello first.
        """
        member = self._membership.get(asleep.worker.worker_id)
        if member is not None and asleep.mode.number < member.hello.mode.number:
            return
        if member is not None:
            self.worker_lost(asleep.worker.worker_id, now, "it sleeps")
        self.control.on_asleep(asleep, now)

    def _admit(self, hello: WorkerHello) -> str | None:
        """Return why a worker cannot be used, or None. Clients of the pool are not given to the
        Conductor, because no request is placed on them.
        """
        if self._membership.is_full:
            return f"this cluster has {len(self._membership)} workers and clients already"
        foreign = self._membership.foreign(hello)
        if foreign is not None:
            return foreign
        wanted = self._config.require_transport
        if hello.role is not Role.CLIENT and wanted and hello.transports != [wanted]:
            return (
                f"it moves KV by {', '.join(hello.transports) or 'nothing'}, and this cluster by "
                f"{wanted} alone (`require-transport`)"
            )
        if hello.role is not Role.CLIENT:
            return self._conductor.on_hello(hello)
        layout = self._conductor.layout
        if layout is None or layout.fingerprint == hello.layout_fingerprint:
            return None
        return f"its KVCache layout {hello.layout_fingerprint} is not {layout.fingerprint}"

    def _told(self, question: AskCluster) -> ClusterTold:
        workers = [member.hello for member in self._membership.members]
        members = [
            (hello.role, hello.node_id) for hello in workers if hello.role is not Role.CLIENT
        ]
        gateways = [self._own, *self._peers.live]
        return ClusterTold(
            asker=question.asker, ticket=question.ticket, facts=self.facts,
            members=[*members, *((Role.GATEWAY, gateway.worker_id) for gateway in gateways)],
            engines=[
                hello.worker for hello in workers if hello.role in (Role.PREFILL, Role.DECODE)
            ],
        )  # fmt: skip

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
                clock_s=report.clock_s,
            )
        )
        self._check_snapshot(report.worker, now)
        if report.load.draining and view.role is not Role.KVSTORE:
            self._let_go(view, now)

    def _let_go(self, leaving: InstanceView, now: float) -> None:
        """Let other workers replace an engine that wants to leave, once there are any. It may leave
        once no request here runs on it or continues with its blocks, or if there are no clients.
        """
        others = any(
            view.role is leaving.role and not view.draining for view in self._conductor.views
        )
        worker_id = leaving.worker_id
        relieved = others and not self._request_manager.is_needed(worker_id)
        relieved = relieved or not self._has_clients
        self._membership.welcome(leaving.worker, now, send_snapshot=False, relieved=relieved)
        if others and leaving.role is Role.DECODE:
            self._request_manager.move_requests_from(worker_id, now, kept_only=True)

    def _check_snapshot(self, worker: WorkerRef, now: float) -> None:
        if self._conductor.needs_snapshot(worker.worker_id):
            self._membership.request_snapshot(worker, now)
