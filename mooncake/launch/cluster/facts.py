"""What a process must know to join a cluster, and how it asks for it.

Gateways tell it by message: any of them may answer, and the channel, which is open for as long as a
process asks, proves that it is one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from mooncake.base import (
    ConfigError,
)
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.base.messages import NextLife
from mooncake.identity.credential import Credential
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.secrets.credentials import kept_secret
from mooncake.launch.host.seeds import ASK_AGAIN_S, NotUp, Seeds
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.options import ModelOptions
from mooncake.scheduler.config import SchedulerConfig

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
GATEWAY_ID = "gateway"
"""The id of the first gateway of a cluster."""
ANSWER_S = 10.0
"""A running gateway answers within this time."""
REMIND_S = 30.0
"""Seconds between two log lines about who is awaited."""


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
