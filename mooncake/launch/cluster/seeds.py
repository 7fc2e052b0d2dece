"""Asks gateways, by message, what a process must know that joins without Ray.

It opens a channel for as long as it asks. Any gateway may answer; the channel proves that it is
one.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time

from mooncake.base import ConfigError, Forbidden, MooncakeError, SystemIds, WorkerRef
from mooncake.base.messages import AskCluster, ClusterTold, Refused
from mooncake.base.rights import client_id
from mooncake.identity import Credential
from mooncake.launch.cluster.facts import ASK_AGAIN_S, ClusterFacts, NotUp, read_facts
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.rpc.listeners import Listener, who_listens
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel

ANSWER_S = 10.0
"""A running gateway answers within this time."""
REMIND_S = 30.0
"""Seconds between two log lines about who is awaited."""
LOOK_S = 3.0
"""A gateway that has not answered is looked for during this time."""

_log = logging.getLogger(__name__)


class Seeds:
    """The gateways at a few addresses. They are asked on a separate channel until `close`."""

    def __init__(self, config: ServeConfig, credential: Credential) -> None:
        """Open the channel. Raises ConfigError if gateways could not answer to `bind_host`."""
        _check_way_back(config.seeds, config.bind_host)
        self.addresses = config.seeds
        self._bind_host = config.bind_host
        self._credential = credential
        self._meant = SeedAddresses(config.seeds)
        self._channel = ZmqChannel(config.bind_host, credential=credential, ports=config.bind_ports)
        # With such an id a gateway knows that only this process is told of a refusal.
        own_id = f"{client_id(credential.certificate.channel_key.hex())}joining"
        self._own = WorkerRef(own_id, SystemIds().hex(8), self._channel.address)

    def close(self) -> None:
        """Close the channel."""
        self._meant.close()
        self._channel.close()

    def ask(self, num_wanted: int = 1) -> list[ClusterTold]:
        """Ask all of them. Return the answers, also to earlier questions, once there are
        `num_wanted` or `ASK_AGAIN_S` has passed.

        Raises:
            Forbidden: some refuse to answer, and none answers.
        """
        asked = list(self._meant)
        for address in asked:
            self._channel.send(address, AskCluster(asker=self._own, ticket=0))
        told: list[ClusterTold] = []
        refused: list[str] = []
        end_s = time.monotonic() + ASK_AGAIN_S
        while len(told) < num_wanted and (left_s := end_s - time.monotonic()) > 0:
            if len(refused) >= len(asked):
                break
            select.select([self._channel], [], [], left_s)  # connections wake it too
            for message in self._channel.receive():
                if not isinstance(message, ClusterTold | Refused) or message.asker != self._own:
                    continue
                if isinstance(message, Refused):
                    refused.append(message.reason)
                else:
                    told.append(message)
        if refused and not told:
            raise Forbidden(f"join: a gateway refuses: {refused[0]}")
        return told

    def why_silent(self) -> MooncakeError:
        """Look for gateways, mostly for `LOOK_S`, and return why none answers: Forbidden where one
        is there and has another cluster secret, else NotUp.
        """
        question = AskCluster(asker=self._own, ticket=0)
        found = who_listens(list(self._meant), self._credential, question, LOOK_S)
        places = {who: address.partition("#") for address, who in found.items()}
        if (place := places.get(Listener.GATEWAY)) is not None:
            return NotUp(
                f"the gateway at {place[0]} does not answer: it still starts, or cannot reach this "
                f"machine at --bind-host {self._bind_host}"
            )
        if (place := places.get(Listener.STRANGER)) is not None:
            restarted = ", or was started again and has another address now" if place[1] else ""
            return Forbidden(
                f"cluster-secret: the gateway at {place[0]} has another one{restarted}"
            )
        return NotUp(
            f"no gateway answers at {' or '.join(self.addresses)}: is one there, and can this "
            "machine reach it?"
        )


def facts_of_seeds(config: ServeConfig, credential: Credential) -> ClusterFacts:
    """Return the answer of the first gateway at `config.seeds` that answers. It asks for
    `join_timeout`, and for at least `ANSWER_S`.

    Raises:
        NotUp: none has answered.
        ConfigError: gateways could not answer to `bind_host`, or they run another release.
        Forbidden: a gateway refuses, or has another cluster secret.
    """
    with contextlib.closing(Seeds(config, credential)) as seeds:
        began_s = time.monotonic()
        told_s = began_s - REMIND_S + 2.0
        limit_s = max(ANSWER_S, config.join_timeout)
        while (now_s := time.monotonic()) < began_s + limit_s:
            for told in seeds.ask():
                return read_facts(told.facts)
            if now_s - told_s > REMIND_S:
                told_s = now_s
                _log.warning("%s; still waiting", seeds.why_silent().message)
        raise seeds.why_silent()


def _check_way_back(seeds: tuple[str, ...], bind_host: str) -> None:
    """Raise ConfigError if no gateway could answer because it runs on another machine."""
    if not environment.is_loopback(bind_host):
        return
    for seed in seeds:
        try:
            here = machine_facts.address_towards(seed)
        except MooncakeError:
            continue  # a name that is not known yet
        if not environment.is_loopback(here):
            raise ConfigError(
                f"bind-host: the gateway at {seed} cannot reach {bind_host} of this machine: give "
                f"its address there, such as --bind-host {here}"
            )
