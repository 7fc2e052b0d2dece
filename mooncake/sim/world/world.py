"""A simulated cluster: the shipped gateway, Conductor, engines, prefill, decode and kvstore
machines on simulated wires.

The world owns what is outside the machines: processes, nodes, the supervisor that notices deaths
and restarts workers, and the clients that submit requests and keep what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.ids import SeededIds
from mooncake.base.kv_layout import KvLayout
from mooncake.base.machine import Machine
from mooncake.base.messages import CostSample, Drain, PeerLost, Role, WorkerHello, WorkerRef
from mooncake.base.request import FinalEvent, GenerateRequest, OutputEvent, RequestOutput
from mooncake.decode.worker import DecodeWorker
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import Runner
from mooncake.instance.config import InstanceConfig
from mooncake.instance.instance import Instance, InstancePorts
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.prefill.worker import PrefillWorker
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimBucket, SimDiskConfig, SimDisks, SimMedium
from mooncake.sim.world.expert_group import ExpertGroup
from mooncake.sim.world.network import (
    Endpoint,
    Network,
    NetworkConfig,
    SimChannel,
    SimRegion,
    SimTransfer,
)
from mooncake.sim.world.process import MIN_PAUSE_S, AfterEvent, SimProcess
from mooncake.sim.world.ranks import LEAD, RankedRunner, RanksLost
from mooncake.sim.world.runner import SimRunner
from mooncake.telemetry.events import Recorder
from mooncake.transfer.engine import Region

GATEWAY_ADDRESS = "gateway"
"""The address of the first gateway, and its id."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one worker of the cluster."""

    worker_id: str
    role: Role
    node_id: str
    experts: str = ""
    """The name of the group of engines that it shares its experts with; empty: none."""


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Delays until a death is noticed and until the worker restarts, in seconds."""

    notice_s: float = 0.05
    restart_s: float | None = 5.0
    """None: a dead worker stays dead."""
    change_s: float = 2.0
    """How long a worker that changes its role is away. It keeps its weights."""


class WorldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings shared by all workers of a world."""

    layout: KvLayout
    engine: dict[Role, EngineConfig]
    kvstore: KvStoreConfig
    instance: InstanceConfig = InstanceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    disk: SimDiskConfig = SimDiskConfig()
    network: NetworkConfig = NetworkConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    page_copies: int = 1
    """How many ranks of an engine hold each page."""
    profile: dict[Role, list[CostSample]] = {}
    """The speed that workers of each role report when they start."""
    max_skew_s: float = 0.0
    """Clocks of processes are ahead of the world's by up to this much."""
    with_bytes: bool = False
    """Whether to move real bytes, so that contents can be compared (small worlds)."""
    seed: int = 0


RunnerFactory = Callable[[WorkerSpec, EventHeap, Region, Callable[[msgspec.Struct], None]], Runner]
"""(worker, heap, its pages, where to deliver events) -> its runner"""


class Stream:
    """The events that a client has received for one request."""

    def __init__(self, request: GenerateRequest, submitted_s: float) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.tokens: list[int] = []
        self.token_times_s: list[float] = []
        self.finals: list[FinalEvent] = []


class Worker:
    """A worker's slot in the cluster; after a death it restarts with a new epoch."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.num_starts = 0
        self.process: SimProcess | None = None
        self.address: str | None = None
        self.machine: PrefillWorker | DecodeWorker | KvNode | None = None
        self.runner: Runner | None = None
        self.former: list[tuple[Role, Runner]] = []
        """What it ran on in other roles."""
        self.pages: SimRegion | None = None
        self.media: list[SimMedium] = []
        """The disks of the node, which outlive its process."""
        self.disks: SimDisks | None = None
        self.retired = False
        """True if it does not come back once it has left."""


@dataclass(frozen=True, slots=True)
class GatewayHost:
    """One gateway and its Conductor."""

    gateway: Gateway
    conductor: Conductor
    process: SimProcess


class World:
    """The simulated cluster, driven by the heap, `submit` and `kill`."""

    def __init__(
        self,
        config: WorldConfig,
        workers: list[WorkerSpec],
        make_runner: RunnerFactory,
        recorder: Recorder,
        after_event: AfterEvent | None = None,
        bucket: SimBucket | None = None,
    ) -> None:
        """`bucket`: what the pool nodes share if their settings name one; None: an empty one."""
        self.config = config
        self.bucket = bucket or SimBucket()
        self.heap = EventHeap()
        self.random = Random(config.seed)
        self.network = Network(self.heap, config.network, Random(config.seed + 1))
        self.streams: dict[str, Stream] = {}
        self._make_runner = make_runner
        self._after_event = after_event
        self._recorder = recorder
        self._skews = Random(config.seed + 4)
        self.gateway_hosts: dict[str, GatewayHost] = {}
        """The living gateways, by id."""
        self._num_gateways = 0
        self._come: dict[str, set[str]] = {}
        """Expert group -> its started workers that wait for the others."""
        self.start_gateway()
        self.workers = {spec.worker_id: Worker(spec) for spec in workers}
        for worker in self.workers.values():
            self.start(worker.spec.worker_id)

    # ------------------------------------------------------------ clients

    @property
    def gateway(self) -> Gateway:
        return self.gateway_hosts[GATEWAY_ADDRESS].gateway

    @property
    def conductor(self) -> Conductor:
        """The Conductor of the first gateway."""
        return self.gateway_hosts[GATEWAY_ADDRESS].conductor

    def submit(self, request: GenerateRequest, gateway_id: str = GATEWAY_ADDRESS) -> Stream:
        """Submit a request now and return the stream that will receive its events."""
        now = self.heap.now()
        stream = Stream(request, now)
        self.streams[request.request_id] = stream
        self.send(request, lambda event: self._receive(stream, event), gateway_id)
        return stream

    def send(
        self,
        request: GenerateRequest,
        sink: Callable[[OutputEvent], None],
        gateway_id: str = GATEWAY_ADDRESS,
    ) -> None:
        """Submit a request now; its events go to the given sink."""
        gateway_host = self.gateway_hosts[gateway_id]
        gateway_host.gateway.submit(request, sink, gateway_host.process.now())
        gateway_host.process.wake(gateway_host.process.now())

    def abort(self, request_id: str, gateway_id: str = GATEWAY_ADDRESS) -> None:
        """Abort a request on behalf of its client."""
        gateway_host = self.gateway_hosts[gateway_id]
        gateway_host.gateway.abort(request_id, gateway_host.process.now())
        gateway_host.process.wake(gateway_host.process.now())

    def _receive(self, stream: Stream, event: OutputEvent) -> None:
        now = self.heap.now()
        if isinstance(event, RequestOutput):
            stream.tokens += event.tokens
            stream.token_times_s += [now] * len(event.tokens)
        else:
            stream.finals.append(event)

    # ------------------------------------------------------------ processes

    def start_gateway(self, gateway_id: str = GATEWAY_ADDRESS) -> None:
        """Start a gateway, or replace one by a fresh one. The requests of the old one have lost
        their clients. A further gateway contacts the first one and learns of all others from it.
        """
        if gateway_id in self.gateway_hosts:
            self.kill_gateway(gateway_id)
        config, number = self.config, self._num_gateways
        self._num_gateways += 1
        conductor = Conductor(config.scheduler, SeededIds(config.seed + 2 + 1000 * number))
        process = self._process(gateway_id)
        endpoint = Endpoint(gateway_id, gateway_id, process.deliver)
        self.network.attach(endpoint)
        gateway = Gateway(
            config.scheduler,
            WorkerRef(gateway_id, f"e{number}", gateway_id),
            conductor,
            SimChannel(self.network, endpoint),
            SeededIds(config.seed + 3 + 1000 * number),
            self._recorder,
            () if gateway_id == GATEWAY_ADDRESS else (GATEWAY_ADDRESS,),
        )
        self.gateway_hosts[gateway_id] = GatewayHost(gateway, conductor, process)
        process.start(gateway)

    def kill_gateway(self, gateway_id: str) -> None:
        """Kill a gateway, as kill -9 does. Its clients are cut off."""
        self.gateway_hosts.pop(gateway_id).process.kill()
        self.network.detach(gateway_id)

    def start(self, worker_id: str) -> None:
        """Start a worker that is not running, with a fresh epoch and empty memory. A worker that
        shares its experts starts once all others of its group have come.
        """
        spec = self.workers[worker_id].spec
        members = self.sharing_experts(spec)
        if members == [self.workers[worker_id]]:
            self._start(worker_id)
            return
        come = self._come.setdefault(spec.experts, set())
        come.add(worker_id)
        if len(come) < len(members):
            return
        come.clear()
        group = ExpertGroup(self.heap)
        for worker in members:
            self._start(worker.spec.worker_id)
            assert isinstance(worker.runner, RankedRunner), "only ranks share experts"
            worker.runner.share_experts(group)

    def sharing_experts(self, spec: WorkerSpec) -> list[Worker]:
        """Return a worker and those that share experts with it."""
        if not spec.experts:
            return [self.workers[spec.worker_id]]
        return [worker for worker in self.workers.values() if worker.spec.experts == spec.experts]

    def _start(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        worker.num_starts += 1
        epoch = f"e{worker.num_starts}"
        address = f"{worker_id}/{epoch}"
        process = self._process(
            address, lambda: self._depart_if_done(worker_id), lambda: self.kill(worker_id)
        )
        ref = WorkerRef(worker_id, epoch, address)

        def deliver(event: msgspec.Struct) -> None:
            is_own_loss = isinstance(event, PeerLost) and event.worker == ref
            if is_own_loss and (isinstance(worker.machine, KvNode) or worker.spec.experts):
                self.kill(worker_id)  # the driver ends one that does not come back by itself
            else:
                process.deliver(event)

        endpoint = Endpoint(address, worker.spec.node_id, deliver)
        self.network.attach(endpoint)
        channel = SimChannel(self.network, endpoint)
        transfer = SimTransfer(
            self.network, endpoint, with_bytes=self.config.with_bytes, skew_s=process.skew_s
        )
        if worker.spec.role is Role.KVSTORE:
            worker.disks = self._disks(worker, process)
            worker.machine = KvNode(
                self.config.kvstore,
                self._hello(worker.spec, ref, num_blocks=0),
                self.config.layout,
                channel,
                transfer,
                GATEWAY_ADDRESS,
                worker.disks,
            )
        else:
            worker.machine = self._make_instance(worker, ref, process, channel, transfer)
        worker.process, worker.address = process, address
        process.start(worker.machine)

    def hang(self, worker_id: str, seconds: float) -> None:
        """Pause a process for a while. What it was writing stands still with it, and lands or is
        refused just before the process handles anything again.
        """
        worker = self.workers[worker_id]
        process = worker.process
        if process is not None and worker.address is not None and not process.stands_still:
            endpoint = self.network.find(worker.address)
            if endpoint is not None:
                endpoint.still_until_s = self.heap.now() + seconds - MIN_PAUSE_S
            process.hang(seconds)
            ranked = self.ranked(worker_id)
            if ranked is not None:
                ranked.hang_rank(LEAD, seconds)

    def ranked(self, worker_id: str) -> RankedRunner | None:
        """Return the ranks of a living worker, or None if it is dead, or has one rank."""
        worker = self.workers[worker_id]
        runner = worker.runner if worker.process is not None else None
        return runner if isinstance(runner, RankedRunner) else None

    def hang_step(self, worker_id: str) -> None:
        """Make an engine's steps never end. Its process and its heartbeats go on."""
        runner = self.workers[worker_id].runner
        if self.workers[worker_id].process is not None and isinstance(runner, SimRunner):
            runner.hung = True

    def kill(self, worker_id: str, *, noticed: bool = True) -> None:
        """Kill a worker, as kill -9 does: nothing of it is left. The supervisor notices a moment
        later. When the whole node dies, only its silence shows it.
        """
        worker = self.workers[worker_id]
        if worker.process is None or worker.address is None:
            return
        self._end(worker)
        supervisor = self.config.supervisor
        if noticed:
            self.heap.after(supervisor.notice_s, lambda: self._notice(worker_id))
        if supervisor.restart_s is not None:
            self.heap.after(supervisor.restart_s, lambda: self._restart(worker_id))

    def _end(self, worker: Worker) -> None:
        assert worker.process is not None, "ended twice"
        assert worker.address is not None
        worker.process.kill()
        if worker.disks is not None:
            worker.disks.kill()
        if isinstance(worker.runner, RankedRunner):
            worker.runner.close()
        self.network.detach(worker.address)
        worker.process = worker.machine = worker.address = None

    def machines(self) -> list[tuple[str, Machine]]:
        """Return every living machine with its name."""
        living: list[tuple[str, Machine]] = [
            (gateway_id, gateway_host.gateway)
            for gateway_id, gateway_host in self.gateway_hosts.items()
        ]
        for worker_id, worker in self.workers.items():
            if worker.machine is not None:
                living.append((worker_id, worker.machine))
        return living

    @property
    def has_pools(self) -> bool:
        """Whether any node has a kvstore worker."""
        return any(worker.spec.role is Role.KVSTORE for worker in self.workers.values())

    def num_pool_replicas(self, key: BlockKey) -> int:
        """Return how many living pool nodes store a block."""
        machines = (worker.machine for worker in self.workers.values())
        return sum(m.stores(key) for m in machines if isinstance(m, KvNode))

    def _process(
        self,
        name: str,
        look: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> SimProcess:
        """Return a process.

        look: is called after each of its events. failed: is called when its engine hangs.
        """

        def after_event(machine: Machine) -> None:
            if self._after_event is not None:
                self._after_event(machine)
            if look is not None:
                look()

        most_s = self.config.max_skew_s
        skew_s = self._skews.uniform(0.0, most_s) if most_s else 0.0
        return SimProcess(name, self.heap, after_event, skew_s, failed)

    def change_role(self, worker_id: str) -> None:
        """Make an engine serve in the other role. Nothing happens when it is the last in its own,
        or shares its experts: such engines keep their role (`launch.config.plan`).
        """
        if self.workers[worker_id].spec.experts:
            return
        gateway_host = self.gateway_hosts[GATEWAY_ADDRESS]
        view = gateway_host.conductor.view(worker_id)
        if view is None or all(
            v is view or v.role is not view.role for v in gateway_host.conductor.views
        ):
            return
        role = Role.DECODE if view.role is Role.PREFILL else Role.PREFILL
        gateway_host.gateway.change_role(worker_id, role, gateway_host.process.now())
        gateway_host.process.wake(gateway_host.process.now())

    def add(self, spec: WorkerSpec) -> None:
        """Start one more worker now."""
        assert spec.worker_id not in self.workers, "a worker of this name exists"
        self.workers[spec.worker_id] = Worker(spec)
        self.start(spec.worker_id)

    def retire(self, worker_id: str, limit_s: float) -> None:
        """Ask an engine to leave for good, as `leave` does. The pool of its node ends with it."""
        self.workers[worker_id].retired = True
        self.leave(worker_id, limit_s)

    def leave(self, worker_id: str, limit_s: float) -> None:
        """Ask an engine to leave (SIGTERM). It says goodbye and ends after `limit_s` at the latest,
        and another process takes its place.
        """
        worker = self.workers[worker_id]
        machine, process = worker.machine, worker.process
        if machine is None or process is None or isinstance(machine, KvNode):
            return
        machine.handle(Drain(), process.now())
        process.wake(process.now())

        def end() -> None:
            if worker.machine is machine:
                self._depart(worker)

        self.heap.after(limit_s, end)

    def _depart_if_done(self, worker_id: str) -> None:
        """End an engine that may go. It comes back in its next role, or else in its own."""
        worker = self.workers[worker_id]
        machine = worker.machine
        if machine is None or isinstance(machine, KvNode):
            return
        instance = machine.instance
        leaves = instance.draining and instance.next_life is None
        if machine.next_life is not None or (
            leaves and machine.quiet and instance.membership.relieved
        ):
            self._depart(worker)

    def _depart(self, worker: Worker) -> None:
        """Let an engine say goodbye, and start it again."""
        machine, worker_id = worker.machine, worker.spec.worker_id
        assert isinstance(machine, PrefillWorker | DecodeWorker)
        gateway = WorkerRef(GATEWAY_ADDRESS, "", GATEWAY_ADDRESS)
        machine.instance.send(gateway, PeerLost(worker=machine.instance.worker))
        assert worker.runner is not None, "an engine without a runner"
        self._end(worker)
        worker.former.append((worker.spec.role, worker.runner))
        worker.runner = None
        life = machine.next_life
        role = worker.spec.role if life is None else life.role or worker.spec.role
        worker.spec = msgspec.structs.replace(worker.spec, role=role)
        if worker.retired:
            self._end_pools(worker.spec.node_id)
            return
        self.heap.after(self.config.supervisor.change_s, lambda: self._restart(worker_id))

    def _end_pools(self, node_id: str) -> None:
        """End the pools of a node that is given back, and tell the gateway."""
        for worker_id, worker in self.workers.items():
            if worker.spec.node_id == node_id and isinstance(worker.machine, KvNode):
                worker.retired = True
                self._end(worker)
                self._notice(worker_id)

    def runners(self, role: Role) -> Iterator[Runner]:
        """Yield the runners of all workers that have had this role."""
        for worker in self.workers.values():
            yield from (runner for former, runner in worker.former if former is role)
            if worker.spec.role is role and worker.runner is not None:
                yield worker.runner

    def _notice(self, worker_id: str) -> None:
        gateway_host = self.gateway_hosts.get(GATEWAY_ADDRESS)
        if self.workers[worker_id].process is None and gateway_host is not None:
            gateway_host.gateway.worker_lost(worker_id, gateway_host.process.now())
            gateway_host.process.wake(gateway_host.process.now())

    def _restart(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        if worker.process is None and not worker.retired:
            self.start(worker_id)

    def _disks(self, worker: Worker, process: SimProcess) -> SimDisks:
        ssd, layout = self.config.kvstore.ssd, self.config.layout
        worker.media = worker.media or [SimMedium() for _ in ssd]
        num_slots = [one.num_bytes // layout.block_bytes for one in ssd]
        media, bucket = worker.media, self.config.kvstore.object_store
        if bucket is not None:
            media = [*media, self.bucket]
            num_slots.append(bucket.num_bytes // layout.block_bytes)
        return SimDisks(self.heap, self.config.disk, media, num_slots, layout, process.deliver)

    def _make_instance(
        self,
        worker: Worker,
        ref: WorkerRef,
        process: SimProcess,
        channel: SimChannel,
        transfer: SimTransfer,
    ) -> PrefillWorker | DecodeWorker:
        layout, engine_config = self.config.layout, self.config.engine[worker.spec.role]
        num_bytes = engine_config.num_blocks * layout.block_bytes
        worker.pages = transfer.allocate(num_bytes, "pages")
        worker.pages.num_copies = self.config.page_copies

        def deliver(event: msgspec.Struct) -> None:
            if isinstance(event, RanksLost):
                self.kill(worker.spec.worker_id)  # its driver ends it too

            else:
                process.deliver(event)

        runner = self._make_runner(worker.spec, self.heap, worker.pages, deliver)
        worker.runner = runner
        instance = Instance(
            self.config.instance,
            layout,
            self._engine(worker.spec.role, engine_config, runner),
            self._hello(worker.spec, ref, num_blocks=engine_config.num_blocks),
            InstancePorts(channel, transfer, worker.pages, GATEWAY_ADDRESS),
        )
        if worker.spec.role is Role.PREFILL:
            return PrefillWorker(instance)
        return DecodeWorker(instance)

    def _engine(self, role: Role, config: EngineConfig, runner: Runner) -> Engine:
        engine = Engine(config, self.config.layout.fingerprint, runner)
        engine.calibrate(self.config.profile.get(role, []))
        return engine

    def _hello(self, spec: WorkerSpec, ref: WorkerRef, num_blocks: int) -> WorkerHello:
        engine = self.config.engine.get(spec.role)
        return WorkerHello(
            worker=ref,
            role=spec.role,
            node_id=spec.node_id,
            host=spec.node_id,
            pid=0,
            layout_fingerprint=self.config.layout.fingerprint,
            block_tokens=self.config.layout.block_tokens,
            num_blocks=num_blocks,
            block_bytes=self.config.layout.block_bytes,
            max_num_seqs=engine.max_num_seqs if engine else 0,
            max_batched_tokens=engine.max_batched_tokens if engine else 0,
            max_gap_s=engine.max_gap_s if engine else None,
            max_gap_is_target=engine.max_gap_is_target if engine else False,
            first_token_s=engine.first_token_s if engine else None,
            num_stages=engine.num_stages if engine else 1,
            expert_group=spec.experts,
            profile=self.config.profile.get(spec.role, []),
        )
