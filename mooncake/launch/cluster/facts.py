"""What a process must know to join a cluster, and how it asks for it.

Gateways tell it by message: any of them may answer, and the channel, which is open for as long as a
process asks, proves that it is one.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from mooncake.base import (
    ConfigError,
    Forbidden,
    MooncakeError,
    SystemIds,
    Unreachable,
    WorkerRef,
)
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.base.messages import AskCluster, ClusterTold, NextLife, Refused
from mooncake.base.rights import client_id
from mooncake.identity import Credential
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.secrets.credentials import kept_secret
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.options import ModelOptions
from mooncake.rpc.listeners import Listener, who_listens
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.config import SchedulerConfig

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
GATEWAY_ID = "gateway"
"""The id of the first gateway of a cluster."""
ASK_AGAIN_S = 0.5
"""Seconds between two questions to a cluster that is not up yet."""
ANSWER_S = 10.0
"""A running gateway answers within this time."""
REMIND_S = 30.0
"""Seconds between two log lines about who is awaited."""
LOOK_S = 3.0
"""A gateway that has not answered is looked for during this time."""


class NotUp(Unreachable):
    """There is no cluster at an address, or not yet."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a joining process must know besides its own credential."""

    gateway_address: str
    worker: WorkerSettings
    """The settings of any engine, without the secret: model, layout and limits are the same for
    all.
    """
    scheduler: SchedulerConfig
    """The settings by which all gateways place requests alike."""
    names: list[str]
    """The names of the model in the API."""


def encode_facts(facts: ClusterFacts) -> bytes:
    """Return the facts without the secret, as gateways tell them by message. They do not say where
    keys of disks and weights are: each machine has its own, and a command that prints a key may
    hold a token.
    """
    worker = without_secret(facts.worker)
    options = msgspec.structs.replace(worker.options, weights_key=ModelOptions().weights_key)
    worker = msgspec.structs.replace(worker, ssd_key=None, options=options)
    return msgspec.msgpack.encode(msgspec.structs.replace(facts, worker=worker))


def with_weights(facts: ClusterFacts, weights: Weights) -> ClusterFacts:
    """Return the facts for processes that join once a cluster serves other weights."""
    life = NextLife(mode=ClusterMode(weights=weights))
    return msgspec.structs.replace(facts, worker=facts.worker.next(life))


def without_secret(settings: WorkerSettings) -> WorkerSettings:
    return msgspec.structs.replace(settings, cluster_secret="")


def read_facts(data: bytes) -> ClusterFacts:
    """Return what `encode_facts` wrote. Fields that only a later release knows are ignored.

    Raises:
        ConfigError: the release that wrote them leaves out fields that this one needs.
    """
    try:
        return msgspec.msgpack.decode(data, type=ClusterFacts)
    except msgspec.ValidationError as problem:
        raise ConfigError(
            "the cluster's first process runs a release that cannot work with this one "
            f"({problem}); run the same release here"
        ) from problem


def when_up(
    ask: Callable[[], Result], limit_s: float, stop: threading.Event | None = None
) -> Result:
    """Return what `ask` returns. While there is no cluster it is called again, for at most
    `limit_s` and until `stop`.

    Raises:
        NotUp: there is no cluster yet.
    """
    end_s = time.monotonic() + limit_s
    stop = stop or threading.Event()
    told = False
    while True:
        try:
            return ask()
        except NotUp as problem:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise
            if not told:
                _log.warning("%s; waiting for at most %.0f s", problem.message, limit_s)
            told = True
            if stop.wait(min(left_s, ASK_AGAIN_S)):
                raise


class Seeds:
    """Asks the gateways at a few addresses, on a separate channel until `close`."""

    def __init__(
        self,
        addresses: Sequence[str],
        credential: Credential,
        bind_host: str,
        ports: tuple[int, int] | None,
    ) -> None:
        """Open the channel at `bind_host`, at one of these ports if a range is given. Raises
        ConfigError if gateways could not answer there.
        """
        _check_way_back(addresses, bind_host)
        self.addresses = addresses
        self._credential = credential
        self._meant = SeedAddresses(addresses)
        self._channel = ZmqChannel(bind_host, credential=credential, ports=ports)
        # With such an id a gateway knows that only this process is told of a refusal.
        own_id = f"{client_id(credential.certificate.channel_key.hex())}joining"
        self._own = WorkerRef(own_id, SystemIds().hex(8), self._channel.address)

    def close(self) -> None:
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
        """Return why no gateway answers: see `why_silent`."""
        return why_silent(self.addresses, self._meant, self._credential, self._own)


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


def joining_secret(config: ServeConfig) -> str:
    """Return the secret or credential of a process that joins: the one that it was given, or the
    one that the cluster's first process keeps on this machine for its own user.

    Raises:
        ConfigError: there is none.
    """
    if config.cluster_secret is not None:
        return config.cluster_secret
    return kept_secret(config.seeds[0])


def facts_of_seeds(config: ServeConfig, credential: Credential) -> ClusterFacts:
    """Return the answer of the first gateway at `config.seeds` that answers. It asks for
    `join_timeout`, and for at least `ANSWER_S`.

    Raises:
        NotUp: none has answered.
        ConfigError: gateways could not answer to `bind_host`, or they run another release.
        Forbidden: a gateway refuses, or has another cluster secret.
    """
    own = config.bind_host, config.bind_ports
    with contextlib.closing(Seeds(config.seeds, credential, *own)) as seeds:
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
