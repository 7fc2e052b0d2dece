"""One worker that joins a running cluster: what it waits for, and its settings, made from what the
cluster says and from its own machine. Stateless. The caller decides whether Ray starts it.
"""

from __future__ import annotations

import dataclasses
import threading

import msgspec

from mooncake.base import SystemIds
from mooncake.identity import Credential
from mooncake.launch.cluster.checks import check_transport
from mooncake.launch.cluster.facts import ClusterFacts, NotUp, when_up
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.plan import check_memory, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.far_ranks import FarStages
from mooncake.launch.worker.process import WorkerSettings


def await_stages(
    settings: WorkerSettings, credential: Credential, limit_s: float, stop: threading.Event
) -> None:
    """Wait until the machines that compute a worker's stages are up.

    Raises:
        NotUp: a machine is not up.
        Forbidden: a machine belongs to another cluster.
    """
    far = FarStages(tuple(settings.stage_hosts), settings.bind_host, credential)

    def ask() -> None:
        try:
            far.greet()
        except OSError as error:
            raise NotUp(str(error)) from error

    when_up(ask, limit_s, stop)


def joining_worker(config: ServeConfig, facts: ClusterFacts, secret: str) -> WorkerSettings:
    """Return the settings of a worker that joins: model and limits come from the cluster, the rest
    from this machine.
    """
    assert config.role is not None
    template = facts.worker
    model = config.model or template.model
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
    [own] = cluster_workers(local, plan, facts.gateway_address, secret, host)
    return msgspec.structs.replace(
        own,
        worker_id=f"{config.role}-{host}-{SystemIds().hex(3)}",
        dtype=template.dtype,
        weights_revision=template.weights_revision,
        layout=template.layout,
        expert_group=template.expert_group,
        options=msgspec.structs.replace(
            template.options, device=own.options.device, shape=plan.options.shape,
            rank_backend=template.options.rank_backend
            if config.rank_backend == "auto"
            else config.rank_backend,
            measure_pages=own.options.measure_pages,
            gpu_memory_utilization=own.options.gpu_memory_utilization,
            weights_key=own.options.weights_key,
        ),
    )  # fmt: skip
