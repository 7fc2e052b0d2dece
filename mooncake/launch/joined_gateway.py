"""One more gateway of a cluster that others look after: `mooncake serve --role gateway --join`.

Learns from Ray's store where the cluster is and how it places requests; from then on it needs only
the workers and the other gateways, and takes no part in Ray. Owns no worker.
"""

from __future__ import annotations

import dataclasses

from mooncake.base import CheckpointError, SystemIds
from mooncake.launch import machine_facts, ray_cluster, report
from mooncake.launch.front import GATEWAY_ID, Front
from mooncake.launch.plan import make_plan
from mooncake.launch.settings import ServeConfig
from mooncake.rpc.zmq_channel import ZmqChannel

MAX_ALONE = 30
"""Looks in a row that find nobody else."""


class JoinedCluster:
    """The cluster behind a gateway that joins it (see `serve.Workers`)."""

    def __init__(self, config: ServeConfig) -> None:
        """Ask for the facts of the cluster at `config.join`; `config` and `plan` are complete then.

        Raises:
            MooncakeError: there is no cluster, or its model is not here.
        """
        assert config.join is not None
        self._facts = facts = ray_cluster.facts_at(config.join)
        worker = facts.worker
        self.config = dataclasses.replace(
            config,
            model=config.model or worker.model,
            served_model_name=config.served_model_name or tuple(facts.names),
            dtype=worker.dtype,
            device="cpu",
            block_size=worker.layout.block_tokens,
            max_model_len=worker.engine.max_model_len,
        )
        plan = make_plan(self.config, machine_facts.num_cores())
        if plan.model.revision != worker.weights_revision:
            raise CheckpointError(
                f"{self.config.model} holds other weights (revision {plan.model.revision}) than "
                f"those of the cluster ({worker.weights_revision})"
            )
        self.plan = dataclasses.replace(plan, scheduler=facts.scheduler)
        self.gateway_id = f"{GATEWAY_ID}-{machine_facts.host_name()}-{SystemIds().hex(3)}"
        self._front: Front | None = None
        self._num_alone = 0

    def open(self) -> Front:
        """Return the gateway, which meets workers and other gateways once it is driven."""
        channel = ZmqChannel(self.config.bind_host, secret=self._facts.cluster_secret)
        self._front = Front(
            self.plan, channel, self.config.names[0],
            gateway_id=self.gateway_id, peers=[self._facts.gateway_address],
        )  # fmt: skip
        return self._front

    def start(self, front: Front, show: report.Show) -> list[report.WorkerRow]:
        del front, show  # its workers run already
        return []

    def stop(self) -> None:
        """Say goodbye: workers let go of what is left, the other gateways do not wait for us."""
        if self._front is not None:
            self._front.gateway.say_goodbye()

    def are_gone(self) -> bool:
        """Whether neither a worker nor another gateway has been there for long: one that looks
        after us can then start us again, and we join what has come in its place.
        """
        assert self._front is not None
        status = self._front.status()
        others = any(gateway.state == "up" for gateway in status.gateways[1:])
        self._num_alone = 0 if status.workers or others else self._num_alone + 1
        return self._num_alone >= MAX_ALONE

    @property
    def join_address(self) -> str | None:
        return None
