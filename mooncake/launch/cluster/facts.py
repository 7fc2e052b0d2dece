"""What a process must know to join a cluster, signed by the cluster's first process, and how a
gateway asks that process for it over HTTP.

The first process's workers tell the same to processes that join by Ray's address (`ray_cluster`),
and gateways tell it by message (`seeds`). Stateless. Nothing here uses Ray: a gateway that joins by
URL needs neither Ray nor its token.
"""

from __future__ import annotations

import base64
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import msgspec

from mooncake.base import ConfigError, Forbidden, MooncakeError, Unavailable, Unreachable
from mooncake.base.rights import CredentialRole
from mooncake.identity import Credential, Trust
from mooncake.launch.host.credentials import seal, sign_request, unseal
from mooncake.launch.host.guard import Guard
from mooncake.launch.host.http_client import Client
from mooncake.launch.host.http_server import Answer, Route, document, error
from mooncake.launch.worker.process import WorkerSettings
from mooncake.model.options import ModelOptions
from mooncake.scheduler.config import SchedulerConfig

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
GATEWAY_ID = "gateway"
"""The id of the first gateway of a cluster."""
SEAL = "cluster facts"
"""The purpose that a signature of the facts names."""
FACTS_PATH = "/v1/cluster/facts"
"""The path at the health port of a cluster's first process, if that process has no API."""
ASK_AGAIN_S = 0.5
"""Seconds between two questions to a cluster that is not up yet."""


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


def sealed_facts(facts: ClusterFacts, credential: Credential) -> bytes:
    """Return the facts without the secret, signed by a gateway's credential."""
    return seal(encode_facts(facts), credential, SEAL)


def without_secret(settings: WorkerSettings) -> WorkerSettings:
    return msgspec.structs.replace(settings, cluster_secret="")


def decode_facts(found: bytes, trust: Trust) -> ClusterFacts:
    """Return the facts that were sealed. Fields that only a later release knows are ignored.

    Raises:
        Forbidden: they come from another cluster, or were altered.
        ConfigError: the release that wrote them leaves out fields that this one needs.
    """
    try:
        data = unseal(found, trust, SEAL, CredentialRole.GATEWAY)
    except MooncakeError as problem:
        raise Forbidden(
            "cluster-secret: it is not the secret of that cluster, or the answer of its first "
            f"process was altered ({problem.message})"
        ) from problem
    return read_facts(data)


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


def facts_routes(sealed: Callable[[], bytes | None], guard: Guard) -> Mapping[str, Route]:
    """Return the route at which workers and gateways get the facts that `sealed` returns. `sealed`
    returns None while they are not known.
    """

    def act(_: object) -> Answer:
        found = sealed()
        if found is None:
            return error(HTTPStatus.SERVICE_UNAVAILABLE, "the cluster is still starting")
        return document(HTTPStatus.OK, {"facts": base64.b64encode(found).decode()})

    return {FACTS_PATH: guard.route("GET", act, CredentialRole.GATEWAY, CredentialRole.WORKER)}


def facts_from(url: str, credential: Credential, ca_certs: str | None) -> ClusterFacts:
    """Ask the first process of a cluster for its facts; the request is signed. `ca_certs`: a file
    of trusted authorities for HTTPS; None: the authorities that this machine trusts.

    Raises:
        NotUp: nobody answers there, or the cluster is still starting.
        Unauthorized, Forbidden: the process refuses, or belongs to another cluster.
        ConfigError: the file is wrong.
    """
    try:
        tls = ssl.create_default_context(cafile=ca_certs) if url.startswith("https:") else None
    except OSError as problem:
        raise ConfigError(f"join-ca-certs: {ca_certs}: {problem}") from problem

    def sign(method: str, path: str, challenge: str) -> str:
        return sign_request(credential, method, path, challenge)

    try:
        found = Client(url, sign=sign, tls=tls).get(FACTS_PATH)
        sealed = base64.b64decode(found["facts"])
    except Unavailable as problem:
        raise NotUp(problem.message) from problem
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"join: {url} is not the health port of a `mooncake serve --headless`"
        ) from problem
    return decode_facts(sealed, credential)


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
