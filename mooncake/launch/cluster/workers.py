"""What `serve` asks of the workers of its cluster, and the settings of each: of those that a plan
asks for, and of one that joins a running cluster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from mooncake.base import ConfigError, Role, SystemIds
from mooncake.crypto.keys import KeySource
from mooncake.identity.credential import Credential
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.cluster.facts import ClusterFacts, when_up
from mooncake.launch.cluster.log_file import DEFAULT_LEVEL
from mooncake.launch.cluster.report import Show, WorkerRow
from mooncake.launch.config.options import values_of
from mooncake.launch.config.plan import ServePlan, check_memory, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.health import HealthSettings
from mooncake.launch.host.secrets.key_source import key_source
from mooncake.launch.host.seeds import NotUp
from mooncake.launch.pool_node.admin import AdminSettings
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.options import FROM_FILES, ExpertGroup, ModelOptions
from mooncake.telemetry.health import Vitals
from mooncake.transfer.choices import check_usable, choose_protocols
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.rdma.settings import RdmaSettings

if TYPE_CHECKING:
    from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess

GPU_SHARES = 10_000
"""Ray counts resources in shares this small."""


class Workers:
    """The workers of one cluster, wherever they run. As it stands, it starts and ends nothing."""

    can_be_joined = False
    """Whether processes may join at the gateway of this process."""

    def start(self, gateway_process: GatewayProcess, show: Show) -> list[WorkerRow]:
        """Start all workers and return when they are ready. Call it in a thread.

        Raises:
            MooncakeError: a worker cannot start, or `stop` was called meanwhile.
        """
        del gateway_process, show
        return []

    def stop(self) -> None:
        """End all workers, also those that are still starting. Called once, after `start`."""

    def hurry(self) -> None:
        """Have the current or next `stop` wait for nobody."""

    def gone(self) -> str:
        """Return why the workers cannot go on unless this process starts again; empty: they can.
        Called again and again, in the loop's thread.
        """
        return ""

    def vitals(self) -> list[Vitals]:
        """Return the state of what this process starts, for its probes. Any thread may call
        this.
        """
        return []


def cluster_workers(
    config: ServeConfig, plan: ServePlan, gateway_address: str, cluster_secret: str, host: str
) -> list[WorkerSettings]:
    """Return the settings of all workers of this machine. If workers come and go, these are as many
    as there may ever be.

    If there are several kvstore workers, the others are divided among them: each pool and its
    engines count as one node, as if they had a machine of their own.
    """
    counts = {
        Role.KVSTORE: plan.num_kvstores,
        Role.DECODE: plan.num_decodes,
        Role.PREFILL: plan.num_prefills,
        Role.EXPERTS: plan.num_experts,
    }
    if config.follows_load:
        counts |= {role: config.most_engines(role) for role in (Role.DECODE, Role.PREFILL)}
    node = config.node_id or host
    num_nodes = max(1, plan.num_kvstores)
    names = [config.require_transport] if config.require_transport else config.transport
    places = itertools.count(1 if config.headless else 0)
    return [
        WorkerSettings(
            role=role,
            worker_id=f"{role.value}-{index}",
            node_id=node if num_nodes == 1 else f"{node}/{index % num_nodes}",
            host=host,
            bind_host=config.bind_host,
            bind_ports=config.bind_ports,
            gateway_address=gateway_address,
            seeds=list(config.seeds),
            cluster_secret=cluster_secret,
            transfer_protocols=list(choose_protocols(names, config.transfer_protection)),
            shm_directory=os.path.abspath(config.shm_directory) if config.shm_directory else "",
            transfer_protection=config.transfer_protection,
            rdma=_rdma_settings(config),
            model=str(plan.model.path),
            dtype=plan.model.dtype,
            weights_revision=plan.model.revision,
            layout=plan.layout,
            engine=plan.engine if role is Role.KVSTORE else plan.engine_of(role),
            instance=_instance_settings(config, plan.options.device),
            kvstore=_own_pool(plan, f"{role.value}-{index}"),
            ssd_key=_ssd_key(config),
            weights_from=config.weights_from,
            num_gpus=_gpus_of(plan, role),
            self_profile=config.self_profile,
            log_level=config.log_level or DEFAULT_LEVEL,
            log_format=config.log_format,
            log_file=config.log_file,
            audit_log=config.audit_log,
            options=plan.options
            if role is Role.KVSTORE
            else msgspec.structs.replace(
                plan.options,
                shape=plan.ranks[role].shape,
                head_at_start=role is Role.DECODE,  # prefill samples one token of each sequence
            ),
            stage_hosts=[]
            if role is Role.KVSTORE or plan.ranks[role].shape.pp == 1
            else list(plan.stage_hosts),
            expert_group=_expert_group(plan, role, index, gateway_address),
            health=health_settings(config, next(places)),
            admin=_admin_settings(config, index) if role is Role.KVSTORE else None,
        )
        for role, number in counts.items()
        for index in range(number)
    ]


def own_facts(config: ServeConfig, plan: ServePlan, address: str) -> ClusterFacts:
    """Return what processes that join the gateway at `address` must know, if this process decides
    it.
    """
    engine = dataclasses.replace(plan, num_prefills=0, num_decodes=1, num_kvstores=0)
    return ClusterFacts(
        gateway_address=address,
        worker=cluster_workers(config, engine, address, "", machine_facts.host_name())[0],
        scheduler=plan.scheduler,
        names=list(config.names),
    )


def _expert_group(
    plan: ServePlan, role: Role, index: int, gateway_address: str
) -> ExpertGroup | None:
    """Return the workers with which the `index`-th worker of a role shares its experts, if any.
    Those that hold nothing else come after those that use them.
    """
    if role is Role.KVSTORE or plan.ranks[role].shape.num_sharers == 1:
        return None
    shape, of_whom = plan.ranks[role].shape, Role.DECODE if role is Role.EXPERTS else role
    engine, number = divmod(index, shape.experts if role is Role.EXPERTS else shape.dp)
    counts = (of_whom, shape.dp), (Role.EXPERTS, shape.experts)
    return ExpertGroup(
        name=f"{of_whom.value}-{engine} of {gateway_address}",
        number=number + (shape.dp if role is Role.EXPERTS else 0),
        size=shape.num_sharers,
        workers=tuple(
            f"{each.value}-{engine * count + other}"
            for each, count in counts
            for other in range(count)
        ),
    )


def _gpus_of(plan: ServePlan, role: Role) -> float:
    """Return the GPUs that a worker takes: one for each rank while this machine has enough,
    otherwise the share that each engine gets.
    """
    if role is Role.KVSTORE or plan.options.device != "cuda":
        return 0.0
    there, wanted = machine_facts.num_gpus(), plan.num_ranks
    if wanted <= there or not there:
        shape = plan.ranks[role].shape
        return float(shape.tp if plan.stage_hosts else shape.num_ranks)
    return math.floor(GPU_SHARES / math.ceil(wanted / there)) / GPU_SHARES


def _own_pool(plan: ServePlan, worker_id: str) -> KvStoreConfig:
    """Return the pool settings of one worker. If several run on one machine, each has its own
    directories below those named.
    """
    if plan.num_kvstores < 2:
        return plan.kvstore
    ssd = [
        msgspec.structs.replace(disk, directory=os.path.join(disk.directory, worker_id))
        for disk in plan.kvstore.ssd
    ]
    return msgspec.structs.replace(plan.kvstore, ssd=ssd)


def health_settings(config: ServeConfig, place: int = 0) -> HealthSettings:
    """Return the health port of the process at `place` among those that this one starts.

    Raises:
        ConfigError: there is no port of that number.
    """
    port = config.health_port + place if config.health_port else 0
    if port > 65535:
        raise ConfigError(
            f"health-port: worker {place + 1} would need port {port}, and the last is 65535; give "
            "a smaller number, or 0"
        )
    return HealthSettings(host=config.health_address, port=port, tls=config.tls("health_"))


def _admin_settings(config: ServeConfig, index: int = 0) -> AdminSettings | None:
    """Return the settings of a pool node's HTTP server, which does not know users' API keys."""
    if config.admin_port is None:
        return None
    port = config.admin_port + index if config.admin_port else 0
    digests = [hashlib.sha256(token.encode()).digest() for token in config.admin_token]
    return AdminSettings(
        host=config.admin_host, port=port, token_digests=digests, tls=config.tls("admin_")
    )


def _instance_settings(config: ServeConfig, device: str) -> InstanceConfig:
    """Return the settings with which an engine on `device` works in its cluster."""
    usual = device == "cpu" and not ListenAddress(config.bind_host).is_loopback
    wanted = {"auto": usual, "on": True, "off": False}
    return InstanceConfig(push_checksums=wanted[config.push_checksums])


def _ssd_key(config: ServeConfig) -> KeySource | None:
    """Return where a pool node finds the keys of its blocks on SSD, or None if the blocks are not
    encrypted.
    """
    if not config.ssd_encryption:
        return None
    return key_source("ssd-key", config.ssd_key_file, config.ssd_key_command)


def _rdma_settings(config: ServeConfig) -> RdmaSettings:
    """Return the settings by which a worker uses RDMA. What is not set is found on its machine."""
    return RdmaSettings(near=dict(config.rdma_near), **values_of(config, RdmaSettings))


def await_stages(
    settings: WorkerSettings, credential: Credential, limit_s: float, stop: threading.Event
) -> None:
    """Wait until the machines that compute a worker's stages are up.

    Raises:
        NotUp: a machine is not up.
        Forbidden: a machine belongs to another cluster.
    """
    from mooncake.launch.worker.ranks.far_ranks import FarStages  # it imports what moves bytes

    far = FarStages(tuple(settings.stage_hosts), settings.bind_host, credential)

    def ask() -> None:
        try:
            far.greet()
        except OSError as error:
            raise NotUp(str(error)) from error

    when_up(ask, limit_s, stop)


def check_transport(config: ServeConfig) -> None:
    """Raise ConfigError if the only transport that KV may use does not work here."""
    if config.require_transport is not None:
        try:
            check_usable(config.require_transport)
        except ConfigError as error:
            raise ConfigError(
                f"require-transport: {config.require_transport} does not work here: {error.message}"
            ) from error


def joining_workers(config: ServeConfig, facts: ClusterFacts, secret: str) -> list[WorkerSettings]:
    """Return the settings of a worker that joins, or of those that share their experts and join
    together: model and limits come from the cluster, the rest from this machine.
    """
    assert config.role is not None
    template = facts.worker
    replaced = template.mode.weights.number and config.role != Role.KVSTORE
    replaced = replaced and config.weights_from == FROM_FILES
    model = template.model if replaced else config.model or template.model
    local = dataclasses.replace(
        config, model=model,
        require_transport=facts.scheduler.require_transport or config.require_transport,
        dtype=template.dtype, block_size=template.layout.block_tokens,
        max_model_len=template.engine.max_model_len,
    )  # fmt: skip
    check_transport(local)
    plan = make_plan(local, machine_facts.num_cores())
    check_memory(plan, machine_facts.available_bytes())
    host = machine_facts.host_name()
    own = cluster_workers(local, plan, facts.gateway_address, secret, host)
    if config.role != Role.KVSTORE:
        _check_mtp(template.options, own[0].options)
    name = f"{config.role}-{host}-{SystemIds().hex(3)}"
    names = [name] if len(own) == 1 else [f"{name}-{number}" for number in range(len(own))]
    return [
        msgspec.structs.replace(
            each,
            worker_id=worker_id,
            dtype=template.dtype,
            weights_revision=template.weights_revision,
            layout=template.layout,
            mode=template.mode,
            expert_group=each.expert_group
            and msgspec.structs.replace(
                each.expert_group, name=f"{name} of {facts.gateway_address}", workers=tuple(names)
            ),
            options=msgspec.structs.replace(
                template.options, device=each.options.device, shape=each.options.shape,
                num_threads=each.options.num_threads, cache_dir=each.options.cache_dir,
                cpu_isa=each.options.cpu_isa, compile_cache=each.options.compile_cache,
                rank_backend=template.options.rank_backend
                if each.options.rank_backend == "auto"
                else each.options.rank_backend,
                measure_pages=each.options.measure_pages,
                draft_model=each.options.draft_model, head_at_start=each.options.head_at_start,
                gpu_memory_utilization=each.options.gpu_memory_utilization,
                weights_key=each.options.weights_key,
            ),
        )
        for each, worker_id in zip(own, names, strict=True)
    ]  # fmt: skip


def _check_mtp(cluster: ModelOptions, own: ModelOptions) -> None:
    """Raise ConfigError if engines with these options cannot join. Blocks of all engines have the
    KV of an MTP layer, or those of none.
    """
    if own.with_mtp and not cluster.with_mtp:
        raise ConfigError(
            "speculative-config: mtp: blocks of the cluster that is joined have no KV of an MTP "
            "layer; leave it out, or start the cluster with it"
        )
