"""The workers of `mooncake serve` on Ray, and the one worker of `mooncake serve --role … --join`.

Owns the supervisor; Ray itself is `ray_cluster`'s.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
from rich.console import Console

from mooncake.base import KvLayout, MooncakeError, Role, SystemIds
from mooncake.launch import environment, machine_facts, ray_cluster, report
from mooncake.launch.front import Front
from mooncake.launch.plan import ServePlan, check_memory, make_plan
from mooncake.launch.process import WorkerSettings, open_model
from mooncake.launch.settings import ServeConfig
from mooncake.launch.workers import cluster_workers

START_WAIT_S = 60.0


class RayWorkers:
    """The workers of a cluster whose gateway is this process (see `serve.Workers`)."""

    def __init__(self, config: ServeConfig, plan: ServePlan, secret: str) -> None:
        self._config = config
        self._plan = plan
        self._secret = secret
        self._supervisor: ray_cluster.Supervisor | None = None
        self._over = threading.Event()
        """`start` has returned or raised."""
        self._stopping = threading.Event()

    def start(self, front: Front, show: report.Show) -> list[report.WorkerRow]:
        try:
            return self._start(front, show)
        finally:
            self._over.set()

    def _start(self, front: Front, show: report.Show) -> list[report.WorkerRow]:
        config, plan = self._config, self._plan
        show("ray", "starting", 0, 0)
        # The tensor library is needed once, to name the weights; it loads while Ray starts.
        with ThreadPoolExecutor(1) as pool:
            naming = pool.submit(_layout, plan)
            ray_cluster.connect(config.ray_address, config.bind_host)
            layout, revision = naming.result()
        show("ray", report.READY, 1, 1)
        settings = cluster_workers(
            config,
            plan,
            (layout, revision),
            front.channel.address,
            self._secret,
            machine_facts.host_name(),
        )
        facts = ray_cluster.ClusterFacts(
            gateway_address=front.channel.address,
            cluster_secret=self._secret,
            worker=settings[0],
        )
        ray_cluster.write_facts(facts)
        if self._stopping.is_set():
            raise MooncakeError("stopped while Ray was starting")
        self._supervisor = ray_cluster.Supervisor(front.worker_lost)
        here_only = environment.is_loopback(config.bind_host)
        pids = self._supervisor.start(settings, show, here_only=here_only)
        return [
            report.WorkerRow(
                each.worker_id,
                each.role,
                pids[each.worker_id],
                each.node_id,
                report.holdings(plan, each.role),
            )
            for each in settings
        ]

    def stop(self) -> None:
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.stop_waiting()
        self._over.wait(START_WAIT_S)
        if self._supervisor is not None:
            self._supervisor.stop()
        ray_cluster.disconnect()

    @property
    def join_address(self) -> str:
        """What others give to `--join`."""
        return ray_cluster.address()


def _layout(plan: ServePlan) -> tuple[KvLayout, str]:
    revision = open_model(str(plan.model.path), plan.model.dtype).revision
    return plan.model.layout(plan.engine.block_tokens, revision), revision


def join(config: ServeConfig) -> int:
    """Run one more worker for a running cluster until a signal; returns the exit code.

    Raises:
        MooncakeError: there is no cluster, or the worker cannot start.
    """
    assert config.role is not None
    assert config.join is not None
    console = Console(stderr=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    supervisor: ray_cluster.Supervisor | None = None
    try:
        ray_cluster.connect(config.join, config.bind_host)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        settings = _joining(config, ray_cluster.read_facts())
        supervisor = ray_cluster.Supervisor(lambda _: None)
        threading.Thread(
            target=_stop_waiting, args=(stop, supervisor), name="signals", daemon=True
        ).start()
        with report.StartProgress(console) as show:
            pids = supervisor.start([settings], show, here_only=True)
        console.print(
            f"{settings.worker_id} (pid {pids[settings.worker_id]}) has joined; Ctrl-C takes it out"
        )
        stop.wait()
        return 0
    except MooncakeError:
        if stop.is_set():
            return 0
        raise
    finally:
        if supervisor is not None:
            supervisor.stop()
        ray_cluster.disconnect()


def _stop_waiting(stop: threading.Event, supervisor: ray_cluster.Supervisor) -> None:
    stop.wait()
    supervisor.stop_waiting()


def _joining(config: ServeConfig, facts: ray_cluster.ClusterFacts) -> WorkerSettings:
    """Return the settings of a worker that joins: the cluster's model and limits, our machine."""
    assert config.role is not None
    template = facts.worker
    model = config.model or template.model
    local = dataclasses.replace(
        config, model=model, dtype=template.dtype, block_size=template.layout.block_tokens,
        max_model_len=template.engine.max_model_len,
    )  # fmt: skip
    plan = make_plan(local, machine_facts.num_cores())
    check_memory(plan, machine_facts.available_bytes())
    host = machine_facts.host_name()
    return msgspec.structs.replace(
        template,
        role=Role(config.role),
        worker_id=f"{config.role}-{host}-{SystemIds().hex(3)}",
        node_id=config.node_id or host,
        host=host,
        bind_host=config.bind_host,
        transfer_protocols=list(config.transfer_protocols),
        model=str(plan.model.path),
        engine=plan.engine,
        kvstore=plan.kvstore,
        num_threads=plan.num_threads,
        self_profile=config.self_profile,
        log_level=config.log_level,
    )
