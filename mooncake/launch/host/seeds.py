"""Asks the gateways of a cluster, of which a process is not a member yet, on a channel that is open
for as long as it asks.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from mooncake.base import ConfigError, Forbidden, MooncakeError, SystemIds, Unreachable, WorkerRef
from mooncake.base.messages import AskCluster, ClusterTold, Refused
from mooncake.base.rights import client_id
from mooncake.identity.credential import Credential
from mooncake.launch.host import environment, machine_facts
from mooncake.rpc.listeners import Listener, who_listens
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel

ASK_AGAIN_S = 0.5
"""Seconds between two questions to a cluster that is not up yet."""
LOOK_S = 3.0
"""A gateway that has not answered is looked for during this time."""


class NotUp(Unreachable):
    """There is no cluster at an address, or not yet."""


class Seeds:
    """Asks the gateways at a few addresses, on a separate channel until `close`."""

    def __init__(
        self,
        addresses: Sequence[str],
        credential: Credential,
        bind_host: str,
        ports: tuple[int, int] | None,
        advertise_host: str | None = None,
    ) -> None:
        """Open the channel at `bind_host`, at one of these ports if a range is given;
        `advertise_host` is what others connect to if `bind_host` is a wildcard. Raises ConfigError
        if gateways could not answer there.
        """
        _check_way_back(addresses, bind_host)
        self.addresses = addresses
        self._credential = credential
        self._meant = SeedAddresses(addresses)
        self.channel = ZmqChannel(
            bind_host, credential=credential, ports=ports, advertise_host=advertise_host,
            tells_ends=True,
        )  # fmt: skip
        # With such an id a gateway knows that only this process is told of a refusal.
        own_id = f"{client_id(credential.certificate.channel_key.hex())}joining"
        self.own = WorkerRef(own_id, SystemIds().hex(8), self.channel.address)
        """Who asks: answers go there."""

    def close(self) -> None:
        self._meant.close()
        self.channel.close()

    def ask(self, num_wanted: int = 1) -> list[ClusterTold]:
        """Ask all of them. Return the answers, also to earlier questions, once there are
        `num_wanted` or `ASK_AGAIN_S` has passed.

        Raises:
            Forbidden: some refuse to answer, and none answers.
        """
        asked = list(self._meant)
        for address in asked:
            self.channel.send(address, AskCluster(asker=self.own, ticket=0))
        told: list[ClusterTold] = []
        refused: list[str] = []
        end_s = time.monotonic() + ASK_AGAIN_S
        while len(told) < num_wanted and (left_s := end_s - time.monotonic()) > 0:
            if len(refused) >= len(asked):
                break
            select.select([self.channel], [], [], left_s)  # connections wake it too
            for message in self.channel.receive():
                if not isinstance(message, ClusterTold | Refused) or message.asker != self.own:
                    continue
                if isinstance(message, Refused):
                    refused.append(message.reason)
                else:
                    told.append(message)
        if refused and not told:
            raise Forbidden(f"join: a gateway refuses: {refused[0]}")
        return told

    def why_silent(self) -> MooncakeError:
        """Return why no gateway answers: see `why_silent`."""
        return why_silent(self.addresses, self._meant, self._credential, self.own)


def why_silent(
    addresses: Sequence[str], meant: Sequence[str], credential: Credential, own: WorkerRef
) -> MooncakeError:
    """Look for gateways, mostly for `LOOK_S`, and return why none answers: Forbidden where one is
    there and has another cluster secret, else NotUp. `meant` is what `addresses` stand for, without
    names. A gateway that can answer does so to `own`.
    """
    found = who_listens(list(meant), credential, AskCluster(asker=own, ticket=0), LOOK_S)
    places = {who: address.partition("#") for address, who in found.items()}
    if (place := places.get(Listener.GATEWAY)) is not None:
        here = own.address.partition("#")[0].removeprefix("tcp://").rpartition(":")[0]
        return NotUp(
            f"the gateway at {place[0]} does not answer: it still starts, or cannot reach this "
            f"machine at --bind-host {here}"
        )
    if (place := places.get(Listener.STRANGER)) is not None:
        restarted = ", or was started again and has another address now" if place[1] else ""
        return Forbidden(f"cluster-secret: the gateway at {place[0]} has another one{restarted}")
    return NotUp(
        f"no gateway answers at {' or '.join(addresses)}: is one there, and can this machine reach "
        "it?"
    )


def _check_way_back(seeds: Sequence[str], bind_host: str) -> None:
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
