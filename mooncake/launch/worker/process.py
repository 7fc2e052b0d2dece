"""Builds one worker in this process from plain settings: memory, model, machine and driver.

This is the only place that knows how a role is wired; `local` and `ray_cluster` both start workers
here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from prometheus_client.core import Metric

from mooncake.base import (
    CheckpointError,
    Clock,
    Drain,
    IdSource,
    KvLayout,
    Machine,
    MonotonicClock,
    MooncakeError,
    PageArray,
    PeerLost,
    Role,
    SystemIds,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.messages import Asleep, CheckWeights, NextLife
from mooncake.base.pool_messages import PoolState
from mooncake.base.rights import CredentialRole
from mooncake.crypto.keys import KeySource
from mooncake.decode import DecodeWorker
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import PolledRunner
from mooncake.identity import Credential, own_credential
from mooncake.instance import Instance, InstanceConfig
from mooncake.instance.instance import InstancePorts
from mooncake.instance.mover import PolledHasher
from mooncake.instance.rank_pages import FollowerPages
from mooncake.instance.sleeper import Sleeper
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.kvstore.storage.disk import PolledDisks
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.health import Facts, Health, HealthSettings
from mooncake.launch.host.key_source import read_keys
from mooncake.launch.host.link_metrics import link_families
from mooncake.launch.host.secret_file import SecretFollower
from mooncake.launch.host.start_phases import StartPhases
from mooncake.launch.pool_node.admin import AdminSettings, PoolAdmin
from mooncake.launch.pool_node.disks import open_disks
from mooncake.launch.pool_node.metrics import node_families
from mooncake.launch.worker.borrowed_weights import BorrowedWeights, Borrower
from mooncake.launch.worker.health_port import HealthPort
from mooncake.launch.worker.held_model import HeldModel, NoFiles, next_settings, sleeps
from mooncake.launch.worker.metrics import EngineFigures, engine_families
from mooncake.launch.worker.open_model import open_model, read_weights
from mooncake.launch.worker.page_hasher import PageHasher
from mooncake.launch.worker.profile import profile, shapes_for
from mooncake.launch.worker.weights_lender import WeightsLender
from mooncake.model.checkpoint.files.checkpoint_files import has_weights
from mooncake.model.options import FROM_ENGINES, FROM_FILES, ExpertGroup, ModelOptions
from mooncake.prefill import PrefillWorker
from mooncake.rpc.channel import PolledChannel
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.engine import PolledTransfer, Region
from mooncake.transfer.factory import AUTO, TransferConfig, choose_protection, open_transfer
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.rdma.backend import RdmaSettings
from mooncake.transfer.regions import Progress, no_progress
from mooncake.transfer.tcp.backend import TcpSettings

if TYPE_CHECKING:  # a worker without a model has no torch either
    from mooncake.model.checkpoint.files.signature import Signature
    from mooncake.model.device.pages import PageMemory
    from mooncake.model.opening import ModelSource

_log = logging.getLogger(__name__)

FIGURES_S = 2.0
"""A driver that does not answer within this time is left out of the metrics."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one worker is started with: plain values that travel to its process."""

    role: Role
    worker_id: str
    node_id: str
    host: str
    """The host as shown to people."""
    bind_host: str
    bind_ports: tuple[int, int] | None = None
    """First and last port that it may listen on; None: any free ports."""
    gateway_address: str
    seeds: list[str] = []
    """Addresses at which gateways may be found at any time; Ray's workers need none."""
    cluster_secret: str
    """The cluster secret, or the text of a worker's credential."""
    transfer_protocols: list[str]
    transfer_protection: str = AUTO
    rdma: RdmaSettings = RdmaSettings()
    model: str
    """Directory of the checkpoint."""
    dtype: str
    weights_revision: str
    layout: KvLayout
    engine: EngineConfig
    kvstore: KvStoreConfig
    ssd_key: KeySource | None = None
    """Where the keys for blocks on SSD are; None: blocks are not encrypted."""
    instance: InstanceConfig = InstanceConfig()
    weights_from: str = FROM_FILES
    """`FROM_FILES`, or `FROM_ENGINES`: from an engine that runs, or else from files."""
    num_threads: int
    num_gpus: float = 0.0
    """GPUs of one node that all its ranks take; below 1: its share of a GPU that engines share."""
    self_profile: bool
    log_level: str
    log_format: str
    log_file: str | None = None
    audit_log: str | None = None
    options: ModelOptions
    health: HealthSettings = HealthSettings()
    """The health port of a worker with its own process."""
    stage_hosts: list[tuple[str, int]] = []
    """Machines that compute the stages before the last one, first stage first, with their ports;
    empty: this machine computes them.
    """
    expert_group: ExpertGroup | None = None
    """The workers with which an engine shares its experts."""
    admin: AdminSettings | None = None
    """The HTTP API server of a pool node."""
    mode: ClusterMode = ClusterMode()
    """The mode in which it was told to come back."""

    def __repr__(self) -> str:
        """Return only the worker's name: one of the settings is a secret."""
        return f"WorkerSettings(worker_id={self.worker_id!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the same for rich, which would otherwise print all fields."""
        return [("worker_id", self.worker_id)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPorts:
    """The world of a worker's machine: what its driver polls, and its clock."""

    channel: PolledChannel
    transfer: PolledTransfer | None
    """None while it sleeps."""
    clock: Clock
    runner: PolledRunner | None = None
    disks: PolledDisks | None = None
    hasher: PolledHasher | None = None
    seeds: SeedAddresses | None = None
    """Addresses at which to look for gateways."""
    lender: WeightsLender | None = None


class WorkerMachine(Machine, Protocol):
    @property
    def next_life(self) -> NextLife | None:
        """How it is to come back, now that nothing is in progress; None: it goes on."""


def _facts(machine: Machine) -> Facts:
    """Return what probes must know about a worker's machine."""
    if isinstance(machine, PrefillWorker | DecodeWorker):
        return Facts(joined=machine.instance.joined, draining=machine.instance.draining)
    if isinstance(machine, Sleeper):
        return Facts(joined=machine.joined, draining=True)
    assert isinstance(machine, KvNode)
    return Facts(joined=machine.joined, draining=machine.draining)


def _figures(machine: Machine) -> EngineFigures | PoolState:
    """Return what a worker's machine reports about itself, for its metrics."""
    if isinstance(machine, PrefillWorker | DecodeWorker):
        engine = machine.instance.engine
        return EngineFigures(machine.instance.load(), engine.stalled_s)
    assert isinstance(machine, KvNode)
    return machine.state()


class Worker:
    """A worker that is ready to be driven. `close` frees what it took; call it after its driver has
    ended.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        ref: WorkerRef,
        ports: WorkerPorts,
        region: Region | None = None,
        pages: PageMemory | None = None,
    ) -> None:
        """Own what lies in `region`, if there is one; `pages` is its memory if that lies on a
        device.
        """
        self.machine = machine
        self.ref = ref
        self._ports = ports
        self._region = region
        self._pages = pages
        self._admin: PoolAdmin | None = None
        self._met = ""
        self.driver = Driver(
            machine,
            ports.channel,
            transfer=ports.transfer,
            runner=ports.runner,
            disks=ports.disks,
            hasher=ports.hasher,
            clock=ports.clock,
            own=ref,
        )
        self._closed = False
        self._leaves = False
        self.driver.stop_when(lambda machine: machine.next_life is not None, None)

    @property
    def next_life(self) -> NextLife | None:
        """How it was told to come back, after its driver ended for that."""
        return None if self._leaves else self.machine.next_life

    @property
    def sleeps(self) -> bool:
        """True if it is an engine that sleeps."""
        return isinstance(self.machine, Sleeper)

    @property
    def gateways(self) -> list[str]:
        """The addresses of the gateways that an engine knows."""
        machine = self.machine
        if isinstance(machine, Sleeper):
            return machine.gateways
        if isinstance(machine, PrefillWorker | DecodeWorker):
            return machine.instance.gateway_addresses
        return []

    @property
    def admin_url(self) -> str:
        """The URL where operators ask a pool node; empty if it has no API server."""
        return self._admin.url if self._admin is not None else ""

    def open_admin(
        self,
        settings: AdminSettings,
        credential: Credential,
        about: dict[str, Any],
        port: HealthPort,
    ) -> None:
        """Open a pool node's HTTP API server, which also answers what the health port does.

        Raises:
            ConfigError: its address cannot be bound.
        """
        self._admin = PoolAdmin(settings, credential, self.driver, about, port.health, port.metrics)

    def tell(self, health: Health) -> None:
        """Have `health` ask this worker for its state from now on."""
        health.watch(lambda: self.driver.call(lambda machine, _: _facts(machine)))

    def families(self) -> list[Metric]:
        """Return its figures as Prometheus families. There are none when its driver does not answer
        or has ended. From any thread.
        """
        if self.sleeps:
            return []
        asked = self.driver.call(lambda machine, _: _figures(machine))
        try:
            figures = asked.result(FIGURES_S)
        except (CancelledError, TimeoutError):
            return []
        worker_id = self.ref.worker_id
        if isinstance(figures, PoolState):
            own = node_families(figures)
        else:
            role = Role.PREFILL if isinstance(self.machine, PrefillWorker) else Role.DECODE
            own = engine_families(worker_id, role, figures)
        links = [] if self._ports.transfer is None else self._ports.transfer.links()
        return [*own, *link_families(worker_id, links)]

    def leave(self, limit_s: float, *, waits: bool = False) -> None:
        """End the driver. Before that, for at most `limit_s`, an engine finishes what others do not
        take over, and a pool node accepts nothing new and saves what is worth it. An engine that
        `waits` serves until another one of its role has taken its place. Returns at once; from any
        thread.
        """
        self._leaves = True
        if limit_s <= 0 or self.sleeps:
            self.driver.stop()
            return

        def done(machine: Any) -> bool:
            if isinstance(machine, KvNode):
                return machine.drained
            return bool(machine.quiet and (machine.instance.relieved or not waits))

        self.driver.call(lambda machine, now: machine.handle(Drain(), now))
        self.driver.stop_when(done, limit_s)

    def meet(self, gateway_address: str) -> None:
        """Look for a gateway at this address too, in place of the one that an earlier call named.
        From any thread.
        """
        self._met = gateway_address
        if self._ports.seeds is not None:
            self._ports.seeds.move(gateway_address)

    def say_goodbye(self, gateway_address: str) -> None:
        """Tell the gateways that this worker ends, so that they wait for no heartbeat."""
        for address in dict.fromkeys([self._met or gateway_address, *self.gateways]):
            self._ports.channel.send(address, PeerLost(worker=self.ref))

    def close(self) -> None:
        """Free model, disks, memory and sockets. The driver must have ended.

        A step that hangs cannot be stopped and still uses model and memory; only the end of the
        process frees them. May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._admin is not None:
            self._admin.close()
        ports, machine = self._ports, self.machine
        if ports.seeds is not None:
            ports.seeds.close()
        if isinstance(machine, PrefillWorker | DecodeWorker) and machine.instance.engine.hung:
            ports.channel.close()
            return
        if ports.runner is not None:
            ports.runner.close()
        if ports.disks is not None:
            ports.disks.close()  # its threads read and write the memory that goes below
        if ports.hasher is not None:
            ports.hasher.close()  # they also read and write it
        if ports.lender is not None:
            ports.lender.leave()
        ports.channel.close()
        if ports.transfer is not None:
            if self._region is not None:
                ports.transfer.unregister(self._region)
            ports.transfer.close()
        if self._pages is not None:
            self._pages.free()  # a worker that comes back in another role takes as many


def doze(
    settings: WorkerSettings,
    channel: PolledChannel,
    model: HeldModel,
    gateways: Sequence[str],
    *,
    ids: IdSource | None = None,
    health_url: str = "",
    lender: WeightsLender | None = None,
) -> Worker:
    """Return the worker of an engine that sleeps. It tells `gateways`, and frees what it does not
    keep at its level of sleep. `lender` lets others read its weights, and those that it has
    checked.
    """
    ref = WorkerRef(settings.worker_id, (ids or SystemIds()).hex(8), channel.address)
    asleep = Asleep(
        worker=ref,
        role=settings.role,
        node_id=settings.node_id,
        host=settings.host,
        pid=os.getpid(),
        level=model.rest(settings.mode.sleep_level),
        mode=settings.mode,
        health_url=health_url,
    )
    seeds = SeedAddresses(settings.seeds)
    known = [*gateways, *([settings.gateway_address] if settings.gateway_address else [])]

    def check(question: CheckWeights) -> None:
        threading.Thread(target=look, args=(question,), name="check-weights", daemon=True).start()

    def look(question: CheckWeights) -> None:
        path, borrows = question.model, False
        revision = fingerprint = error = ""
        try:
            revision, fingerprint = model.check(question, settings.layout)
            if lender is not None:
                lender.offer(revision, Path(path))
        except MooncakeError as problem:
            error, borrows = problem.message, isinstance(problem, NoFiles)
        except Exception as problem:  # whatever it is, the cluster keeps its weights
            _log.exception("the weights in %s cannot be checked", path)
            error = f"{path} cannot be checked ({type(problem).__name__}); the log says why"
        worker.driver.call(
            lambda machine, _: machine.checked(revision, fingerprint, error, borrows=borrows)
        )

    interval_s = settings.instance.report_interval_s
    lend = None if lender is None else lender.ask
    machine = Sleeper(asleep, channel, known, seeds, check, interval_s, lend)
    ports = WorkerPorts(
        channel=channel, transfer=None, clock=MonotonicClock(), seeds=seeds, lender=lender
    )
    worker = Worker(machine, ref, ports)  # `look` calls it
    return worker


def build(
    settings: WorkerSettings,
    channel: PolledChannel,
    transfer: PolledTransfer,
    *,
    model: ModelSource | None = None,
    progress: Progress = no_progress,
    ids: IdSource | None = None,
    health_url: str = "",
    rank_transfer: TransferConfig | None = None,
    lender: WeightsLender | None = None,
) -> Worker:
    """Return the worker that `settings` describe, over the given ports. Engines need `model`.
    `health_url`: the URL of its process' health port. `rank_transfer`: the settings of the transfer
    engines of ranks that have their own memories. `lender` lets others read the weights.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: a directory of the pool cannot be used.
        TransferError: there is not enough memory for the pages or the pool.
    """
    ref = WorkerRef(settings.worker_id, (ids or SystemIds()).hex(8), channel.address)
    hello = WorkerHello(
        worker=ref,
        role=settings.role,
        node_id=settings.node_id,
        host=settings.host,
        pid=os.getpid(),
        layout_fingerprint=settings.layout.fingerprint,
        block_tokens=settings.layout.block_tokens,
        num_blocks=0,
        block_bytes=settings.layout.block_bytes,
        expert_group=settings.expert_group.name if settings.expert_group is not None else "",
        health_url=health_url,
        transports=settings.transfer_protocols,
        mode=settings.mode,
    )
    ports = WorkerPorts(
        channel=channel, transfer=transfer, clock=MonotonicClock(),
        seeds=SeedAddresses(settings.seeds), lender=lender,
    )  # fmt: skip
    if settings.role is Role.KVSTORE:
        progress("allocating the pool", 0, 0)
        return _build_pool(settings, hello, ports)
    assert model is not None, "an engine needs a model"
    return _build_engine(settings, hello, ports, model, progress, rank_transfer)


def _build_pool(settings: WorkerSettings, hello: WorkerHello, ports: WorkerPorts) -> Worker:
    assert ports.transfer is not None, "only a worker that sleeps has none"
    disks = open_disks(settings.kvstore, settings.layout, settings.ssd_key)
    try:
        node = KvNode(
            settings.kvstore, hello, settings.layout, ports.channel, ports.transfer,
            settings.gateway_address, disks, () if ports.seeds is None else ports.seeds,
        )  # fmt: skip
    except BaseException:
        disks.close()
        raise
    return Worker(node, hello.worker, dataclasses.replace(ports, disks=disks), node.region)


def _build_engine(
    settings: WorkerSettings,
    hello: WorkerHello,
    ports: WorkerPorts,
    model: ModelSource,
    progress: Progress,
    rank_transfer: TransferConfig | None,
) -> Worker:
    assert ports.transfer is not None, "only a worker that sleeps has none"
    layout, config, options = settings.layout, settings.engine, settings.options
    if settings.role is Role.PREFILL:  # it samples one token of each sequence
        config = dataclasses.replace(config, speculation=None)
    if model.revision != settings.weights_revision:
        raise CheckpointError(
            f"{settings.model} holds other weights (revision {model.revision}) than those of the "
            f"cluster ({settings.weights_revision})"
        )
    model.load(lambda done, whole: progress("loading weights", done, whole))
    progress("allocating KV pages", 0, 0)
    config = dataclasses.replace(config, num_blocks=model.num_pages(layout, config))
    array = PageArray(layout, config.num_blocks, config.num_homes)
    own_array = options.held_by(0, array)
    region: Region
    pages: PageMemory | None = None
    of_ranks = dict[str, bytes]()
    if options.own_memories:
        of_ranks["transfer"] = msgspec.msgpack.encode(rank_transfer)
    if model.owns_pages:
        pages = model.device_pages(layout, config.num_blocks)
        region = ports.transfer.register_device(pages, "kv-pages")
        runner = model.runner(layout, config, pages, settings.num_threads, None, **of_ranks)
    else:
        region = ports.transfer.allocate(own_array.num_bytes, "kv-pages")
        threads = settings.num_threads
        runner = model.runner(layout, config, region.buffer, threads, region.fd, **of_ranks)
    model.warm_up(config, lambda done, whole: progress("warming up", done, whole))
    samples = []
    if settings.self_profile:
        progress("timing a few steps", 0, 0)
        samples = profile(runner, shapes_for(settings.role, config), config, ports.clock)
    hello = msgspec.structs.replace(
        hello,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_gap_s=config.max_gap_s,
        max_gap_is_target=config.max_gap_is_target,
        first_token_s=config.first_token_s,
        num_stages=config.num_stages,
        profile=samples,
    )
    hasher = None
    if settings.instance.push_checksums:
        hasher = PageHasher(region, own_array)
    engine = Engine(config, layout.fingerprint, runner)
    engine.calibrate(samples)
    instance = Instance(
        settings.instance,
        layout,
        engine,
        hello,
        InstancePorts(
            ports.channel,
            ports.transfer,
            region,
            settings.gateway_address,
            hasher,
            own_array,
            _followers(settings, model, array) if options.own_memories else (),
            () if ports.seeds is None else ports.seeds,
            None if ports.lender is None else ports.lender.ask,
        ),
    )
    machine = PrefillWorker(instance) if settings.role is Role.PREFILL else DecodeWorker(instance)
    ports = dataclasses.replace(ports, runner=runner, hasher=hasher)
    return Worker(machine, hello.worker, ports, region, pages)


def _followers(
    settings: WorkerSettings, model: ModelSource, array: PageArray
) -> list[FollowerPages]:
    """Return the pages of the other ranks, each in its own memory."""
    link, verify = model.lead, settings.instance.verify_fetches
    assert link is not None, "ranks have a lead"
    found = []
    for rank, opened in enumerate(model.memories, 1):
        assert opened.segment is not None, "peers reach every rank of a worker"
        held = settings.options.held_by(rank, array)
        found.append(
            FollowerPages(rank, held, opened.segment, opened.region_id, link, verify=verify)
        )
    return found


def _open(
    settings: WorkerSettings,
    credential: Credential,
    model: HeldModel | None,
    progress: Progress,
    advertise_host: str | None,
    health_url: str,
    gateways: Sequence[str],
    lender: WeightsLender | None,
) -> Worker:
    """Return the worker over its own sockets. A worker that cannot be built leaves no sockets
    open. `gateways`: those that its former life knew. `lender`: that of an engine's process.
    """
    with contextlib.ExitStack() as opened:
        channel = ZmqChannel(
            settings.bind_host, credential=credential, ports=settings.bind_ports,
            advertise_host=advertise_host,
        )  # fmt: skip
        opened.callback(channel.close)
        if lender is not None:
            lender.serve(channel, settings.weights_revision, Path(settings.model))
            opened.callback(lender.leave)
        if model is not None and sleeps(settings):
            worker = doze(settings, channel, model, gateways, health_url=health_url, lender=lender)
            opened.pop_all()
            return worker
        source = None if model is None else model.use(settings)
        config = _transfer_config(settings, advertise_host)
        transfer = open_transfer(
            config, SystemIds().hex(8), MonotonicClock(), credential=credential,
            progress=progress,
        )  # fmt: skip
        opened.callback(transfer.close)
        worker = build(
            settings, channel, transfer, model=source, progress=progress, health_url=health_url,
            rank_transfer=config, lender=lender,
        )  # fmt: skip
        opened.pop_all()
        return worker


def _transfer_config(settings: WorkerSettings, advertise_host: str | None) -> TransferConfig:
    """Return the configuration of a worker's transfer engine."""
    listen = ListenAddress(settings.bind_host, advertise_host, settings.bind_ports)
    return TransferConfig(
        secret=settings.cluster_secret,
        host=machine_facts.boot_id(),
        protocols=settings.transfer_protocols,
        protection=choose_protection(settings.transfer_protection),
        tcp=TcpSettings(listen=listen),
        rdma=settings.rdma,
    )


def run(
    settings: WorkerSettings,
    *,
    progress: Progress,
    started: Callable[[Worker], None],
    advertise_host: str | None = None,
    secret_file: Path | str | None = None,
) -> None:
    """Be the worker that `settings` describe until its driver is stopped.

    A worker that was told to come back ends, and a new one begins: with the same weights in another
    role, with others, or asleep.
    `advertise_host` is what peers connect to if `bind_host` is a wildcard. `started` is called with
    each worker before it is driven. `secret_file` is the file of the cluster secret, which is
    followed as it changes. When a machine fails, the health port stays open and says so until the
    process has ended.

    Raises:
        MooncakeError: the worker cannot start.
        Exception: its machine failed.
    """
    credential = own_credential(
        settings.cluster_secret, CredentialRole.WORKER, name=settings.worker_id
    )
    port = HealthPort(
        settings.health,
        settings.worker_id,
        settings.role,
        limit_s=settings.engine.step_timeout_s,
        own_host=advertise_host or settings.bind_host,
    )

    phases = StartPhases("opening the health port")

    def show(what: str, done: int, whole: int) -> None:
        phases.begin(what)
        port.health.starting(what, done, whole)
        progress(what, done, whole)

    def has_started(worker: Worker) -> None:
        phases.begin("ready")
        _log.info(phases.text())
        started(worker)

    model: HeldModel | None = None
    lender: WeightsLender | None = None
    following = SecretFollower(secret_file, credential.renew)
    try:
        if settings.role is not Role.KVSTORE:
            show("importing the tensor library", 0, 0)
            borrower = _borrower(settings, credential, advertise_host)
            model = HeldModel(
                _opener(settings, credential, show, borrower), _reader(settings, borrower)
            )
            lender = WeightsLender(
                settings.worker_id, _transfer_config(settings, advertise_host), credential,
                settings.options.cache_dir,
            )  # fmt: skip
            model.use(settings)
        gateways: list[str] = []
        while True:
            worker = _open(
                settings, credential, model, show, advertise_host, port.url, gateways, lender
            )
            life = _be(settings, credential, worker, has_started, port)
            gateways = worker.gateways
            del worker  # nothing of it is needed
            if life is None:  # the process ends: looking for garbage would only delay that
                break
            gc.unfreeze()
            phases = StartPhases("changing its role" if life.role else "coming back")
            settings = next_settings(settings, life)
    finally:
        following.close()
        if lender is not None:
            lender.close()
        if model is not None:
            model.close()
        if not port.health.failed:
            port.close()


def _borrower(
    settings: WorkerSettings, credential: Credential, advertise_host: str | None
) -> Borrower | None:
    """Return what finds the weights of other engines; None: this one reads files."""
    if settings.weights_from != FROM_ENGINES:
        return None
    if settings.expert_group is not None:
        _log.warning("weights are read from files: engines that share their experts read no others")
        return None
    gateways = dict.fromkeys([*settings.seeds, settings.gateway_address])
    key = settings.options.weights_key
    return Borrower(
        list(filter(None, gateways)), Path(settings.model),
        _transfer_config(settings, advertise_host), credential, lambda: read_keys(key),
        settings.options.cache_dir,
    )  # fmt: skip


def _opener(
    settings: WorkerSettings, credential: Credential, show: Progress, borrower: Borrower | None
) -> Callable[[str, str], ModelSource]:
    """Return how a worker opens the checkpoint in a directory, with all that shares its model."""

    def opened(path: str, revision: str) -> ModelSource:
        borrowed = None
        if borrower is not None:
            show("asking engines for weights", 0, 0)
            path = str(borrower.directory(Path(path)))
            borrowed = _borrowed(borrower, Path(path), revision)
        peers = None
        if settings.expert_group is not None:
            from mooncake.launch.worker.expert_peers import meet

            show("waiting for those that share its experts", 0, 0)
            peers = meet(settings.expert_group, credential, settings.options)
        far = None
        if settings.stage_hosts:
            from mooncake.launch.worker.far_ranks import FarStages

            far = FarStages(tuple(settings.stage_hosts), settings.bind_host, credential)
        return open_model(path, settings.dtype, settings.options, peers, far, borrowed)

    return opened


def _reader(
    settings: WorkerSettings, borrower: Borrower | None
) -> Callable[[CheckWeights], tuple[Signature, str]]:
    """Return how a worker that sleeps reads what a question names: from files of this machine, or
    else from an engine that has some.
    """

    def read(question: CheckWeights) -> tuple[Signature, str]:
        path = Path(question.model)
        if borrower is None or has_weights(path):
            return read_weights(question.model, settings.options)
        if not question.lenders:
            raise NoFiles(f"{path} has no weights, and no engine has files of them to lend")
        found = borrower.borrow(path, question.revision, question.lenders)
        if isinstance(found, str):
            raise CheckpointError(f"{path} has no weights, and no engine lends any ({found})")
        try:
            return read_weights(str(borrower.directory(path)), settings.options, found)
        finally:
            found.close()

    return read


def _borrowed(borrower: Borrower, path: Path, revision: str) -> BorrowedWeights | None:
    """Return the weights of an engine that runs; None: no engine lends them."""
    found = borrower.borrow(path, revision)
    if isinstance(found, BorrowedWeights):
        _log.info("weights are read from %s, which serves them", found.loan.lent.lender)
        return found
    if not has_weights(path):
        raise CheckpointError(
            f"{path} has no weights, and no engine lends any ({found}): start this worker again "
            "once an engine of the cluster serves, or copy the weights there"
        )
    _log.warning("weights are read from %s: %s", path, found)
    return None


def _be(
    settings: WorkerSettings,
    credential: Credential,
    worker: Worker,
    started: Callable[[Worker], None],
    port: HealthPort,
) -> NextLife | None:
    """Drive a worker to its end; return how to come back, if it was told to."""
    # What was made so far lives as long as the worker: full collections need not walk it again.
    # Nor does this one walk what was imported before a fork: its memory would be copied.
    gc.collect()
    gc.freeze()
    try:
        if settings.admin is not None:
            worker.open_admin(settings.admin, credential, _about(settings), port)
        _log.info("health at %s", port.url)
        started(worker)
        with port.of(worker, settings.role):
            worker.driver.run()
        worker.say_goodbye(settings.gateway_address)
        return worker.next_life
    finally:
        worker.close()


def _about(settings: WorkerSettings) -> dict[str, Any]:
    """Return what a client must know about a pool node besides the secret."""
    return {
        "gateway_address": settings.gateway_address,
        "node_id": settings.node_id,
        "layout": msgspec.to_builtins(settings.layout),
        "ssd": [msgspec.to_builtins(disk) for disk in settings.kvstore.ssd],
        "pid": os.getpid(),
    }
