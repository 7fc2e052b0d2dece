"""A gateway that starts no worker: `mooncake serve --role gateway`.

A gateway that joins learns from another gateway where the cluster is and how it places requests. A
gateway whose address others join decides this by its own settings. From then on it needs only the
workers and the other gateways, and does not use Ray. Owns no worker.
"""

from __future__ import annotations

import dataclasses

import msgspec

from mooncake.base import CheckpointError, ConfigError, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.facts import (
    GATEWAY_ID,
    ClusterFacts,
    encode_facts,
    facts_of_seeds,
    joining_secret,
)
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.cluster.workers import Workers, own_facts
from mooncake.launch.config.plan import make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel

MAX_ALONE = 30
"""Number of looks in a row that may find no worker and no other gateway."""


class JoinedCluster(Workers):
    """Knows the cluster that this gateway joins; its workers run already."""

    def __init__(self, config: ServeConfig) -> None:
        """Ask the cluster at `config.join` for its facts, unless `config` decides them. `config`
        and `plan` are complete afterwards.

        Raises:
            MooncakeError: there is no cluster, or its model is not here.
        """
        num_cores = machine_facts.num_cores()
        if config.is_seed:
            self._credential = own_credential(str(config.cluster_secret), CredentialRole.GATEWAY)
            self.config, self.plan = config, make_plan(config, num_cores)
            self._facts = own_facts(config, self.plan, "")
        else:
            self._facts = facts = self._ask(config)
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
            plan = make_plan(self.config, num_cores)
            replaced = worker.mode.weights.number  # it has no weights, only the files beside them
            if not replaced and plan.model.revision != worker.weights_revision:
                raise CheckpointError(
                    f"{self.config.model} holds other weights (revision {plan.model.revision}) "
                    f"than those of the cluster ({worker.weights_revision})"
                )
            self.plan = dataclasses.replace(plan, scheduler=facts.scheduler, layout=worker.layout)
        self._following = SecretFollower(config.cluster_secret_file, self._credential.renew)
        own = machine_facts.host_name() if config.node_id is None else config.node_id
        # One at a fixed port comes back under its name.
        self.gateway_id = f"{GATEWAY_ID}-{own}-{config.join_port or SystemIds().hex(3)}"
        self._addresses = SeedAddresses(())
        self._gateway_process: GatewayProcess | None = None
        self._num_alone = 0

    def _ask(self, config: ServeConfig) -> ClusterFacts:
        """Ask for the facts, with the credential that this gateway uses from then on."""
        self._credential = own_credential(joining_secret(config), CredentialRole.GATEWAY)
        return facts_of_seeds(config, self._credential)

    def open(self) -> GatewayProcess:
        """Return the gateway. It finds workers and other gateways once it is driven.

        Raises:
            ConfigError: the address cannot be bound, or this credential does not allow others to
                join it.
        """
        config, port = self.config, self.config.join_port
        if port and self._credential.listening_seed is None:
            raise ConfigError(
                "join-port: processes that join here expect the cluster's own key, which this "
                "credential does not have: leave the port out, or give the secret, or the gateway "
                "credential that `mooncake cluster init` makes"
            )
        channel = ZmqChannel(
            config.bind_host, credential=self._credential, is_typed=bool(port), tells_ends=True,
            ports=(port, port) if port else config.bind_ports,
        )  # fmt: skip
        told = self._facts.gateway_address
        self._addresses = SeedAddresses([*config.seeds, *([told] if told else [])])
        self._gateway_process = GatewayProcess(
            self.plan, channel, config.names[0], gateway_id=self.gateway_id,
            peers=self._addresses,
        )  # fmt: skip
        facts = msgspec.structs.replace(self._facts, gateway_address=channel.address)
        self._gateway_process.gateway.facts = encode_facts(facts)
        return self._gateway_process

    def stop(self) -> None:
        """Announce the end: workers and other gateways then wait for no heartbeat of this
        gateway.
        """
        self._following.close()
        self._addresses.close()
        if self._gateway_process is not None:
            self._gateway_process.gateway.say_goodbye()

    def gone(self) -> str:
        """Return a reason once no worker and no other gateway has been known for long. A supervisor
        can then start this gateway again, and it joins the cluster that has taken the place of the
        old one.
        """
        assert self._gateway_process is not None
        if self.config.is_seed:
            return ""  # other gateways come to this one
        status = self._gateway_process.status()
        others = any(gateway.state == "up" for gateway in status.gateways[1:])
        self._num_alone = 0 if status.workers or others else self._num_alone + 1
        if self._num_alone < MAX_ALONE:
            return ""
        return f"the cluster of {self.config.join} is gone; start again to join another"
