"""`--colocated`: door and one engine in one process, no Ray. The workers are `local`'s threads."""

from __future__ import annotations

import os

from mooncake.base import SystemIds
from mooncake.launch import machine_facts, report
from mooncake.launch.front import GATEWAY_ID, Front
from mooncake.launch.local import LocalCluster
from mooncake.launch.plan import ServePlan
from mooncake.launch.process import open_model
from mooncake.launch.settings import ServeConfig
from mooncake.launch.workers import cluster_workers
from mooncake.rpc.inproc import InprocChannel, InprocNetwork


class ColocatedWorkers:
    """The workers of one process (see `serve.Workers`)."""

    def __init__(self, config: ServeConfig, plan: ServePlan) -> None:
        self._config = config
        self._plan = plan
        self._network = InprocNetwork()
        self.gateway_channel = InprocChannel(self._network, GATEWAY_ID)
        self._cluster: LocalCluster | None = None
        self._starting = True
        self._lost: list[str] = []

    def start(self, front: Front, show: report.Show) -> list[report.WorkerRow]:
        plan = self._plan
        show("engine", "importing the tensor library", 0, 0)
        model = open_model(str(plan.model.path), plan.model.dtype, plan.options)
        settings = cluster_workers(
            self._config,
            plan,
            self.gateway_channel.address,
            SystemIds().hex(16),
            machine_facts.host_name(),
        )
        self._cluster = LocalCluster(
            self._network,
            model,
            lost=front.worker_lost,
            progress=lambda what, done, whole: show("engine", what, done, whole),
        )
        self._cluster.start(settings)
        self._starting = False
        return [
            report.WorkerRow(
                each.worker_id, each.role, os.getpid(), each.node_id,
                report.holdings(plan, each.role),
            )
            for each in settings
        ]  # fmt: skip

    def stop(self) -> None:
        if self._cluster is not None and not self._starting:
            self._cluster.stop()

    def are_gone(self) -> bool:
        return False  # they end with us

    @property
    def join_address(self) -> str | None:
        return None
