"""A pool standing alone: one node and, unless it joins another's, the registry of the pool, in this
process, without Ray and without engines. For machines with DRAM and disks to spare, and for clients
that are no workers of ours.

Owns the order of starting and stopping. The registry is the gateway's own machine: it knows who is
there, says who was lost, and tells clients of a node where its blocks are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import msgspec
from rich.console import Console

from mooncake.base import ConfigError, Role, SystemIds, WorkerRef
from mooncake.kvstore.node import KvNode
from mooncake.launch import machine_facts, pool_metrics, process, report, standing
from mooncake.launch.driver import Driver
from mooncake.launch.front import GATEWAY_ID
from mooncake.launch.plan import ServePlan, check_memory, make_plan
from mooncake.launch.pool_admin import AdminSettings
from mooncake.launch.settings import ServeConfig
from mooncake.launch.workers import cluster_workers
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.conductor import Conductor
from mooncake.scheduler.gateway import Gateway
from mooncake.telemetry.events import Recorders
from mooncake.telemetry.log import configure_logging
from mooncake.telemetry.metrics import Metrics

DEFAULT_ADMIN_PORT = 8100
WILDCARDS = ("0.0.0.0", "::", "*")


class Registry:
    """Who belongs to the pool, in a thread of its own. `close` it after all that use it."""

    def __init__(self, config: ServeConfig, plan: ServePlan, secret: str) -> None:
        """Raises ConfigError when `pool_port` is taken, or `bind_host` is not ours."""
        machine_facts.check_port(config.bind_host, config.pool_port, "bind-host", "pool-port")
        ids = SystemIds()
        self._channel = ZmqChannel(config.bind_host, secret=secret, port=config.pool_port)
        ref = WorkerRef(GATEWAY_ID, ids.hex(8), self._channel.address)
        gateway = Gateway(
            plan.scheduler, ref, Conductor(plan.scheduler, ids), self._channel, ids,
            Recorders(Metrics("pool")),
        )  # fmt: skip
        self.address = ref.address
        self._driver = Driver(gateway, self._channel, own=ref)
        self._thread = threading.Thread(target=self._drive, name="registry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; nodes and clients that are left go on without."""
        self._driver.stop()
        self._thread.join()
        self._channel.close()

    def _drive(self) -> None:
        try:
            self._driver.run()
        except Exception:  # the driver has logged it; without a registry the dead hold memory
            os._exit(1)


def serve_alone(config: ServeConfig) -> int:
    """Be a pool node until SIGINT or SIGTERM, then drain and return the exit code.

    Raises:
        MooncakeError: it cannot be started; nothing is left running.
    """
    assert config.cluster_secret is not None
    if config.bind_host in WILDCARDS:
        raise ConfigError(
            f"bind-host: {config.bind_host} is no address that clients could connect to; name one "
            "of this machine"
        )
    plan = make_plan(config, machine_facts.num_cores())
    check_memory(plan, machine_facts.available_bytes())
    configure_logging("pool", sys.stderr, level=config.log_level.upper())
    registry = Registry(config, plan, config.cluster_secret) if config.join is None else None
    address = registry.address if registry is not None else str(config.join)
    node_id = config.node_id or machine_facts.host_name()
    try:
        with contextlib.closing(standing.hold_name(f"kvstore-{node_id}", node_id, address)):
            _serve_node(config, plan, address)
    finally:
        if registry is not None:
            registry.close()
    return 0


def _serve_node(config: ServeConfig, plan: ServePlan, gateway_address: str) -> None:
    secret, host = str(config.cluster_secret), machine_facts.host_name()
    [settings] = cluster_workers(config, plan, gateway_address, secret, host)
    settings = msgspec.structs.replace(
        settings,
        worker_id=f"kvstore-{settings.node_id}",
        admin=settings.admin
        or AdminSettings(
            host=config.admin_host, port=DEFAULT_ADMIN_PORT, keys=[*config.api_key, secret]
        ),
    )
    console = Console(stderr=True)
    worker: process.Worker | None = None
    watch: standing.JoinWatch | None = None

    def leave(leaving: process.Worker, limit_s: float) -> None:
        if limit_s:
            say("draining; Ctrl-C again ends it at once")
        leaving.leave(limit_s)

    def say(words: str) -> None:
        console.print(words, soft_wrap=True, highlight=False)

    def started(begun: process.Worker) -> None:
        nonlocal worker, watch

        def on_signal(*_: object) -> None:
            # A second signal ends what the first has begun to finish.
            limits_s.append(0.0)
            # Not here: the interrupted loop may hold the lock that it takes.
            threading.Thread(target=leave, args=(begun, limits_s.pop(0)), daemon=True).start()

        limits_s = [config.shutdown_timeout]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        say(f"{settings.worker_id} (pid {os.getpid()}) has a {report.holdings(plan, Role.KVSTORE)}")
        say(f"clients and other nodes: {gateway_address}")
        say(f"pool node at {begun.admin_url} - Ctrl-C drains and stops")
        worker = begun
        watch = standing.JoinWatch(begun.driver, settings.worker_id, gateway_address)

    try:
        process.run(settings, progress=process.no_progress, started=started)
    finally:
        if watch is not None:
            watch.close()
    say(f"{settings.worker_id} has ended{_fate(worker)}")


def _fate(worker: process.Worker | None) -> str:
    """Say what became of a node's blocks, if it drained."""
    if worker is None or not isinstance(worker.machine, KvNode):
        return ""
    drain = worker.machine.state().drain
    return "" if drain is None else f"; {pool_metrics.fate(drain)}"
