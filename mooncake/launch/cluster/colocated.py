"""`--colocated`: API server and one engine in one process, without Ray. The workers are threads
(`launch.worker.local`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mooncake.base import SystemIds
from mooncake.launch.cluster import report
from mooncake.launch.cluster.facts import GATEWAY_ID
from mooncake.launch.cluster.gateway_process import GatewayProcess
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.http_server import Route
from mooncake.launch.worker.local import LocalCluster
from mooncake.launch.worker.open_model import open_model
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.telemetry.health import Vitals

if TYPE_CHECKING:
    from mooncake.model.opening import ModelSource


class ColocatedWorkers:
    """The workers of one process: implements `serve.Workers`."""

    def __init__(self, config: ServeConfig, plan: ServePlan) -> None:
        self._config = config
        self._plan = plan
        self._network = InprocNetwork()
        self.gateway_channel = InprocChannel(self._network, GATEWAY_ID)
        self._cluster: LocalCluster | None = None
        self._model: ModelSource | None = None
        self._starting: Vitals | None = Vitals(starting="starting", joined=False)

    def start(self, gateway_process: GatewayProcess, show: report.Show) -> list[report.WorkerRow]:
        plan = self._plan

        def progress(what: str, done: int, whole: int) -> None:
            self._starting = Vitals(starting=what, num_done=done, num_whole=whole, joined=False)
            show("engine", what, done, whole)

        progress("importing the tensor library", 0, 0)
        self._model = open_model(str(plan.model.path), plan.model.dtype, plan.options)
        settings = cluster_workers(
            self._config,
            plan,
            self.gateway_channel.address,
            SystemIds().hex(16),
            machine_facts.host_name(),
        )
        self._cluster = LocalCluster(
            self._network,
            self._model,
            lost=gateway_process.worker_lost,
            progress=progress,
            protocols=("inproc", "shm") if plan.options.own_memories else ("inproc",),
        )
        self._cluster.start(settings)
        self._starting = None
        return [
            report.WorkerRow(
                each.worker_id, each.role, os.getpid(), each.node_id,
                report.holdings(plan, each.role),
            )
            for each in settings
        ]  # fmt: skip

    def stop(self) -> None:
        if self._cluster is not None and self._starting is None:
            self._cluster.stop()
        if self._model is not None:
            self._model.close()

    def hurry(self) -> None:
        pass  # it does not wait for other workers

    def gone(self) -> str:
        broken = "" if self._cluster is None else self._cluster.broken
        return broken and f"{broken}; start it again"

    def vitals(self) -> list[Vitals]:
        starting = self._starting
        if starting is not None or self._cluster is None:
            return [starting or Vitals(starting="starting", joined=False)]
        return self._cluster.vitals()

    def routes(self) -> Mapping[str, Route]:
        return {}

    @property
    def join_address(self) -> str | None:
        return None
