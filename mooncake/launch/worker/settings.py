"""The settings of one worker: plain values that travel to its process. Reads nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake.base import KvLayout, Role
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.messages import NextLife
from mooncake.crypto.keys import KeySource
from mooncake.engine.config import EngineConfig
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.host.health import HealthSettings
from mooncake.launch.pool_node.admin import AdminSettings
from mooncake.model.options import FROM_FILES, ExpertGroup, ModelOptions
from mooncake.transfer.choices import AUTO
from mooncake.transfer.rdma.settings import RdmaSettings


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
    shm_directory: str = ""
    """See `TransferConfig`."""
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

    @property
    def sleeps(self) -> bool:
        """True if the worker is an engine that sleeps."""
        return self.role is not Role.KVSTORE and self.mode.sleep_level > 0

    def next(self, life: NextLife) -> WorkerSettings:
        """Return the settings with which the worker comes back."""
        settings = msgspec.structs.replace(self, role=life.role or self.role)
        mode = life.mode
        if mode is None:
            return settings
        weights = mode.merged(self.mode).weights  # a gateway may not have heard of the newest
        if weights != self.mode.weights:
            settings = msgspec.structs.replace(
                settings,
                model=weights.model,
                weights_revision=weights.revision,
                layout=msgspec.structs.replace(self.layout, fingerprint=weights.fingerprint),
            )
        mode = msgspec.structs.replace(mode, weights=weights)
        return msgspec.structs.replace(settings, mode=mode)
