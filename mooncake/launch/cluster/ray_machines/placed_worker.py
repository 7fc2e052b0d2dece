"""A worker that Ray places on a machine of a cluster that a file describes. The file on that
machine says what the worker is, so Ray carries only its name.

Runs in processes of Ray, whose environment names the file and the machine. Imports no ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from mooncake import __version__
from mooncake.base import Role
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.facts import facts_of_seeds, without_secret
from mooncake.launch.cluster.supervision.worker_handle import (
    PACKET_BYTES,
    Begin,
    Leave,
    connected,
    end_left,
    place_of,
    running_at,
)
from mooncake.launch.cluster.workers import joining_workers
from mooncake.launch.config.cluster_file import ClusterFile, Machine, read_cluster_file
from mooncake.launch.config.config import resolve
from mooncake.launch.host import environment
from mooncake.launch.host.build import revision

FILE, MACHINE = "MOONCAKE_UP_FILE", "MOONCAKE_UP_MACHINE"
"""Variables that name the cluster's file on this machine, and this machine in it."""
POLL_S = 0.2
END_S = 4.0


def names_of(cluster: ClusterFile) -> list[tuple[Role, str]]:
    """Return the role and the name of each worker that Ray places."""
    return [
        (Role(role), f"{role}-{index}")
        for role, number in cluster.placed.items()
        for index in range(number)
    ]


def begin(role: Role, worker_id: str) -> tuple[Path, Begin]:
    """Return the socket of a worker of this machine, and what its process is told. It waits for a
    gateway, which says how the cluster works.

    Raises:
        MooncakeError: the worker cannot run here.
    """
    file = Path(environment.variables()[FILE])
    cluster = read_cluster_file(str(file))
    machine = _own(cluster)
    os.chdir(file.parent)
    part = cluster.placed_part(machine, role.value)
    config = resolve(dict(part.given), None, {})
    assert config.cluster_secret is not None
    assert config.cluster_secret_file is not None
    credential = own_credential(config.cluster_secret, CredentialRole.WORKER)
    facts = facts_of_seeds(config, credential)
    [settings] = joining_workers(config, facts, config.cluster_secret)
    # Two machines may run it while one of them does not reach the other.
    settings = msgspec.structs.replace(settings, worker_id=f"{worker_id}-{machine.name}")
    return _place(worker_id), Begin(
        settings=without_secret(settings), secret=config.cluster_secret,
        secret_file=str(Path(config.cluster_secret_file).absolute()), advertise_host=None,
        fingerprint=_fingerprint(part.given), orphan_s=config.orphan_timeout,
    )  # fmt: skip


def held(worker_ids: Iterable[str]) -> dict[str, str]:
    """Return which of these workers run on this machine, and their GPUs."""
    return running_at({worker_id: _place(worker_id) for worker_id in worker_ids})


def leave(worker_ids: Iterable[str], limit_s: float, hurries: Callable[[], bool]) -> None:
    """Have those of these workers that run on this machine leave the cluster once others do their
    work, which takes `limit_s` at most, and return when they have ended. A worker that has
    not ended `END_S` later is killed. All are killed when `hurries` returns true.
    """
    waiting = {}
    for worker_id in worker_ids:
        if (connection := connected(place := _place(worker_id))) is not None:
            with contextlib.suppress(OSError):  # it has just ended
                connection.send(msgspec.msgpack.encode(Leave(limit_s=limit_s, waits=True)))
            waiting[place] = connection
    end_s = time.monotonic() + limit_s + END_S
    while waiting and time.monotonic() < end_s and not hurries():
        ready, _, _ = select.select([*waiting.values()], [], [], POLL_S)
        for place, connection in list(waiting.items()):
            if connection in ready and not _says_more(connection):
                connection.close()
                del waiting[place]
    for place, connection in waiting.items():
        connection.close()
        end_left(place)


def _says_more(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(PACKET_BYTES))
    except OSError:
        return False


def _own(cluster: ClusterFile) -> Machine:
    name = environment.variables()[MACHINE]
    return next(machine for machine in cluster.machines if machine.name == name)


def _place(worker_id: str) -> Path:
    return place_of(f"up {environment.variables()[FILE]}", worker_id)


def _fingerprint(given: Mapping[str, object]) -> str:
    """Return what must be the same for a process to go on as this worker: the release, the GPUs
    that it sees, and its settings in the file. Gateways may come and go.
    """
    same = {name: value for name, value in given.items() if name != "join"}
    gpus = environment.variables().get(environment.SEEN_GPUS, "")
    words = [__version__, revision(), gpus, json.dumps(same, sort_keys=True)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()
