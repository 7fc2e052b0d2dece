"""A pool without engines, in this process and without Ray: one node and, unless it joins another
pool, that pool's registry. It serves machines with DRAM and disks to spare, and clients that are
not our workers.

Owns the order of starting and stopping. The registry is the gateway's own machine: it keeps the
membership table, announces lost members, and tells clients where blocks are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from pathlib import Path

import msgspec
from rich.console import Console

from mooncake.base import ConfigError, KvLayout, MooncakeError, Role, SystemIds, WorkerRef
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.cluster import report
from mooncake.launch.cluster.checks import check_start
from mooncake.launch.cluster.facts import (
    ANSWER_S,
    GATEWAY_ID,
    ClusterFacts,
    encode_facts,
    read_facts,
)
from mooncake.launch.cluster.log_file import start_log
from mooncake.launch.cluster.lone_worker import run_worker
from mooncake.launch.cluster.workers import cluster_workers, own_facts
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.launch.host.seeds import NotUp, Seeds, why_silent
from mooncake.launch.pool_node import metrics as pool_metrics
from mooncake.launch.pool_node import node_lock
from mooncake.launch.worker.worker import Worker
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.audit import configure_audit
from mooncake.telemetry.events import Recorders
from mooncake.telemetry.metrics import Metrics
from mooncake.transfer.regions import no_progress

DEFAULT_ADMIN_PORT = 8100


class Registry:
    """Knows the members of the pool, in its own thread. `close` it after all that use it."""

    def __init__(self, config: ServeConfig, plan: ServePlan, secret: str) -> None:
        """Start the thread. Raises ConfigError if `join_port` is taken, or `bind_host` is not an
        address of this machine.
        """
        machine_facts.check_port(config.bind_host, config.join_port, "bind-host", "join-port")
        ids = SystemIds()
        credential = own_credential(secret, CredentialRole.GATEWAY, name="registry")
        ports = (config.join_port, config.join_port) if config.join_port else config.bind_ports
        self._channel = ZmqChannel(
            config.bind_host, credential=credential, ports=ports, is_typed=True, tells_ends=True
        )
        ref = WorkerRef(GATEWAY_ID, ids.hex(8), self._channel.address)
        gateway = Gateway(
            plan.scheduler, ref, Conductor(plan.scheduler, ids, layout=plan.layout), self._channel,
            ids, Recorders(Metrics("pool")),
        )  # fmt: skip
        self.address = ref.address
        gateway.facts = encode_facts(own_facts(config, plan, ref.address))
        self._following = SecretFollower(config.cluster_secret_file, credential.renew)
        self._driver = Driver(gateway, self._channel, own=ref)
        self._thread = threading.Thread(target=self._drive, name="registry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Nodes and clients that remain go on without it."""
        self._following.close()
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
        MooncakeError: the node cannot be started; nothing is left running.
    """
    assert config.cluster_secret is not None
    if config.admin_port is None:
        config = dataclasses.replace(config, admin_port=DEFAULT_ADMIN_PORT)
    plan = make_plan(config, machine_facts.num_cores())
    check_start(config, plan)
    start_log("pool", config.log_level, config.log_format, config.log_file)
    configure_audit("pool", config.audit_log)
    registry = Registry(config, plan, str(config.cluster_secret)) if config.join is None else None
    address = registry.address if registry is not None else config.seeds[0]
    node_id = config.node_id or machine_facts.host_name()
    try:
        with contextlib.closing(node_lock.lock_name(f"kvstore-{node_id}", node_id, address)):
            _serve_node(config, plan, address)
    finally:
        if registry is not None:
            registry.close()
    return 0


def _serve_node(config: ServeConfig, plan: ServePlan, gateway_address: str) -> None:
    secret, host = str(config.cluster_secret), machine_facts.host_name()
    [settings] = cluster_workers(config, plan, gateway_address, secret, host)
    settings = msgspec.structs.replace(settings, worker_id=f"kvstore-{settings.node_id}")
    console = Console(stderr=True, markup=False)
    worker: Worker | None = None
    watch: node_lock.JoinWatch | None = None

    def say(words: str) -> None:
        console.print(words, soft_wrap=True, highlight=False)

    def started(begun: Worker) -> None:
        nonlocal worker, watch
        say(f"{settings.worker_id} (pid {os.getpid()}) has a {report.holdings(plan, Role.KVSTORE)}")
        say(f"clients and other nodes: {gateway_address}")
        say(f"pool node at {begun.admin_url} - Ctrl-C drains and stops")
        worker = begun
        if watch is not None:  # it comes back for new weights
            watch.close()
        watch = node_lock.JoinWatch(
            begun.driver, settings.worker_id, gateway_address,
            functools.partial(_why_silent, config, plan, meant, begun.ref),
            max(ANSWER_S, config.join_timeout),
        )  # fmt: skip

    with SeedAddresses(config.seeds or [gateway_address]) as meant:
        try:
            run_worker(config, settings, no_progress, started)
        finally:
            if watch is not None:
                watch.close()
    if watch is not None and watch.refusal is not None:
        raise watch.refusal
    say(f"{settings.worker_id} has ended{_fate(worker)}")


def _why_silent(
    config: ServeConfig, plan: ServePlan, meant: SeedAddresses, own: WorkerRef
) -> MooncakeError:
    """Return why a pool does not let a node in: ConfigError where its blocks are not those of the
    pool, Forbidden where it has another secret, otherwise NotUp. The secret is what its file holds
    by now.
    """
    try:
        file = config.cluster_secret_file
        secret = str(config.cluster_secret) if file is None else read_secret(Path(file))
        credential = own_credential(secret, CredentialRole.WORKER)
        if config.seeds:
            # At any port: this node has taken its own.
            asking = Seeds(config.seeds, credential, config.bind_host, None)
            with contextlib.closing(asking) as seeds:
                told = [read_facts(each.facts) for each in seeds.ask()]
            for problem in (_misfit(plan.layout, facts) for facts in told):
                if problem is not None:
                    return problem
        return why_silent(config.seeds or meant, meant, credential, own)
    except ConfigError as error:
        return NotUp(error.message)  # such as a file of the secret that is just being replaced
    except MooncakeError as error:
        return error


def _misfit(own: KvLayout, facts: ClusterFacts) -> ConfigError | None:
    """Return why blocks of the layout `own` are of no use to a cluster, or None."""
    theirs = facts.worker.layout
    if own == theirs:
        return None
    setting = "model" if own.block_tokens == theirs.block_tokens else "block-size"
    return ConfigError(
        f"{setting}: the cluster of the gateway at {facts.gateway_address.partition('#')[0]} does "
        f"not use this node: a block has {own.block_tokens} tokens here and {theirs.block_tokens} "
        f"there, and the KVCache layouts are {own.fingerprint} and {theirs.fingerprint}; start the "
        "node with the model, weights, KV dtype, block size and method of drafts of the cluster, "
        "or leave the model out: the cluster then tells them"
    )


def _fate(worker: Worker | None) -> str:
    """Return what became of a node's blocks, if it drained."""
    if worker is None or not isinstance(worker.machine, KvNode):
        return ""
    drain = worker.machine.state().drain
    return "" if drain is None else f"; {pool_metrics.fate(drain)}"
