"""Reads the file that describes a cluster of several machines: `mooncake up FILE` runs on each of
them.

It says what runs on which machine, as settings of `mooncake serve`. Starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mooncake.base import ConfigError, Role
from mooncake.base.rights import CredentialRole
from mooncake.launch.config import options
from mooncake.launch.config.config import read_yaml, unknown_setting
from mooncake.launch.config.options import bracketed, count, flag
from mooncake.launch.config.settings import API, ServeConfig
from mooncake.launch.host.environment import is_loopback

ROLES = ("gateway", "prefill", "decode", "kvstore")
"""All roles, in the order in which they are named and started."""
STAGE = "stage"
"""The kind of a process that computes stages of engines on other machines. Gateways do not know
it.
"""
STAGE_PORT = 7100
RAY = "ray"
"""The kind of a process that makes its machine a node of Ray, which places engines over all such
machines.
"""
RAY_PORT = 6379
PLACED_ROLES = ("prefill", "decode")
"""The roles that Ray may place. Gateways and pool nodes belong to a machine."""
ORPHAN_S = 600
"""How long a worker that Ray has placed serves on when Ray is lost, unless the file says
otherwise: a machine in whose place another one has become Ray's head must find it.
"""
JOIN_PORT = 6400
"""The port at which others join the first gateway of a machine; a second gateway has the next
port.
"""
JOIN_TIMEOUT_S = 24 * 3600
CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""Files of a machine's bundle, beside the file of the cluster."""
RAY_TOKEN = "ray.token"
"""The file of the token by which nodes of Ray know each other, in the bundle of each."""
CREDENTIALS = {
    f"{kind.value}.credential": kind for kind in (CredentialRole.GATEWAY, CredentialRole.WORKER)
}
"""Credential files of its gateways and of its workers."""
SECRET, SAFE = "secret", "authority"
"""The cluster's secret, and the folder of what no machine may have, beside those of the machines.
"""

_TOP = ("model", "machines", RAY, "settings", *ROLES)
LABELS = "labels"
_MACHINE = ("address", LABELS, *ROLES, STAGE, RAY)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DECIDED = frozenset(
    {
        "model", "role", "join", "join_port", "join_timeout", "headless",
        "colocated", "prefill", "decode", "kvstore", "node_id", "bind_host", "cluster_secret",
        "cluster_secret_file", "dry_run", "check", "hardware", "health_host", "host",
    }
) | {name for name in options.options_of(ServeConfig) if name.startswith("ray_")}  # fmt: skip
"""Settings that follow from the rest of the file."""
_STAGES = "pipeline_parallel_size"
_SHARING = "data_parallel_size"
_OF_GATEWAYS = frozenset(
    name
    for name, (option, _) in options.options_of(ServeConfig).items()
    if option.group == API and name != "shutdown_timeout"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine: the address where others reach it, and how many processes of each role run
    there.
    """

    name: str
    address: str
    counts: Mapping[str, int]
    labels: tuple[str, ...] = ()
    """KEY=VALUE each: it is the machine that is given all of these, and maybe others."""

    @property
    def credentials(self) -> dict[str, CredentialRole]:
        """The credential files of the machine's processes, and the roles that each file proves."""
        kinds = {_kind(role) for role, number in self.counts.items() if number}
        return {file: kind for file, kind in CREDENTIALS.items() if kind in kinds}

    @property
    def bundle(self) -> tuple[str, ...]:
        """All files that the machine needs besides the cluster's file."""
        token = (RAY_TOKEN,) if self.counts.get(RAY) else ()
        return (*self.credentials, CERTIFICATE, KEY, AUTHORITY, *token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    role: str
    given: Mapping[str, object]
    """The settings of the process, as written in the file."""
    command: tuple[str, ...] = ("serve",)
    """The words before these settings in the command that starts the process."""

    @property
    def words(self) -> list[str]:
        """The words of the command that starts it, which all users of the machine see."""
        given = {name: value for name, value in self.given.items() if not _option(name).secret}
        flags = (word for name, value in given.items() for word in _flags(name, value))
        return [*self.command, *flags]

    @property
    def environ(self) -> dict[str, str]:
        """The secrets among the process' settings, by their environment variables."""
        options = {name: _option(name) for name in self.given}
        return {
            option.env: str(_only(self.given[name]))
            for name, option in options.items()
            if option.secret
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFile:
    path: Path
    model: str
    machines: tuple[Machine, ...]
    settings: Mapping[str, Mapping[str, object]]
    """The settings of all processes (under "settings") and of the processes of each role."""
    placed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many workers of each role Ray places over the machines."""

    def total(self, role: str) -> int:
        """Return how many processes of a role the cluster has."""
        here = sum(machine.counts.get(role, 0) for machine in self.machines)
        return here + self.placed.get(role, 0)

    @property
    def ray_hosts(self) -> list[str]:
        """The addresses of the machines that are nodes of Ray, in the order in which they become
        its head.
        """
        return [machine.address for machine in self.machines if machine.counts.get(RAY)]

    def told(self, role: str) -> dict[str, object]:
        """Return the settings of the processes of a role, as written in the file."""
        return {**self.settings["settings"], **self.settings.get(role, {})}

    def value_of(self, name: str, role: str) -> Any:
        """Return a setting of the processes of a role; the default if the file does not say it."""
        option, default = options.options_of(ServeConfig)[name]
        told = self.told(role)
        return option.read(name, told[name]) if name in told else default

    @property
    def seeds(self) -> list[str]:
        """The addresses that each process joins."""
        return [
            f"{options.DIRECT}{bracketed(machine.address)}:{JOIN_PORT + index}"
            for machine in self.machines
            for index in range(machine.counts.get("gateway", 0))
        ]

    @property
    def stage_hosts(self) -> list[str]:
        """The addresses of the machines that compute stages of engines on other machines."""
        return [
            f"{bracketed(machine.address)}:{STAGE_PORT}"
            for machine in self.machines
            if machine.counts.get(STAGE)
        ]

    def members(self, machine: Machine) -> dict[str, int]:
        """Return how many workers of each role the gateways know on a machine, and its gateways by
        their ids.
        """
        wanted = {
            f"{role}@{machine.name}": machine.counts[role]
            for role in ROLES[1:]
            if machine.counts.get(role)
        }
        for index in range(machine.counts.get("gateway", 0)):
            wanted[f"gateway-{machine.name}-{JOIN_PORT + index}"] = 1
        return wanted

    def missing(self, told: Iterable[Iterable[tuple[Role, str]]]) -> dict[str, int]:
        """Return how many of each kind no gateway knows, by the members that each has reported."""
        here: Counter[str] = Counter()
        for members in told:
            here |= Counter(
                name if role is Role.GATEWAY else f"{role.value}@{name}" for role, name in members
            )
        wanted: Counter[str] = Counter()
        for machine in self.machines:
            wanted += Counter(self.members(machine))
        for role, number in self.placed.items():
            wanted[role] = number
            here[role] = sum(n for name, n in here.items() if name.startswith(f"{role}@"))
        return dict(wanted - here)

    def parts(self, machine: Machine) -> list[Part]:
        """Return the processes of a machine. Files that they name lie beside the cluster's file."""
        parts = [
            self._part(machine, role, index)
            for role in ROLES
            for index in range(machine.counts.get(role, 0))
        ]
        if machine.counts.get(RAY):
            words = ("up", self.path.name, f"--machine={machine.name}", "--ray-node")
            parts.append(Part(name=f"{RAY}-0", role=RAY, given={}, command=words))
        return [*parts, *self._stage(machine)]

    def placed_part(self, machine: Machine, role: str) -> Part:
        """Return a worker of a role that Ray may place on a machine."""
        part = self._part(machine, role, 0)
        return dataclasses.replace(part, given={"orphan_timeout": ORPHAN_S, **part.given})

    def _part(self, machine: Machine, role: str, index: int) -> Part:
        tls = {"certfile": CERTIFICATE, "keyfile": KEY}
        of_role = self.told(role)
        if role != "gateway":
            of_role = {n: v for n, v in of_role.items() if n not in _OF_GATEWAYS}
        given: dict[str, object] = {
            "model": self.model, "role": role, "join": ",".join(self.seeds),
            "bind_host": machine.address, "node_id": machine.name,
            "cluster_secret_file": f"{_kind(role).value}.credential",
            "join_timeout": JOIN_TIMEOUT_S,
        }  # fmt: skip
        if role == "gateway":
            port = self.value_of("port", role) + index
            given |= {"join_port": JOIN_PORT + index, "host": machine.address}
            given |= {f"ssl_{name}": file for name, file in tls.items()}
            given |= {"prefill": self.total("prefill")}
            given |= {**of_role, "port": port}
        else:
            given |= {f"health_ssl_{name}": file for name, file in tls.items()}
            if self.stage_hosts and self.value_of(_STAGES, role) != 1:
                given |= {"stage_hosts": self.stage_hosts}
            given |= of_role
        return Part(name=f"{role}-{index}", role=role, given=given)

    def _stage(self, machine: Machine) -> list[Part]:
        if not machine.counts.get(STAGE):
            return []
        given: dict[str, object] = {
            "bind_host": machine.address, "port": STAGE_PORT,
            "cluster_secret_file": f"{_kind(STAGE).value}.credential",
        }  # fmt: skip
        if (limit_s := self.settings["settings"].get("shutdown_timeout")) is not None:
            given["shutdown_timeout"] = limit_s
        return [Part(name=f"{STAGE}-0", role=STAGE, given=given, command=("ranks",))]


def read_cluster_file(path: str) -> ClusterFile:
    """Return the contents of a cluster's file.

    Raises:
        ConfigError: it cannot be read, a key is unknown, or it describes no cluster.
    """
    loaded = _mapping(path, "it", read_yaml(path, "file"), _TOP)
    model = loaded.get("model")
    if not isinstance(model, str):
        raise ConfigError(
            f"{path}: model: the model is missing; give the directory that has its checkpoint on "
            "each machine"
        )
    machines = loaded.get("machines")
    if not isinstance(machines, dict) or not machines:
        raise ConfigError(
            f"{path}: machines: the machines are missing; list each with its address and its roles"
        )
    placed = _placed(path, loaded.get(RAY))
    found = ClusterFile(
        path=Path(path),
        model=model,
        machines=tuple(
            _machine(path, str(name), told, by_ray=bool(placed)) for name, told in machines.items()
        ),
        placed=placed,
        settings={
            group: _settings(path, group, loaded.get(group)) for group in ("settings", *ROLES)
        },
    )
    _check(found)
    return found


def _kind(role: str) -> CredentialRole:
    return CredentialRole.GATEWAY if role == "gateway" else CredentialRole.WORKER


def _placed(path: str, told: object) -> dict[str, int]:
    """Return how many workers of each role Ray is to place."""
    if told is None:
        return {}
    values = _mapping(path, RAY, told, PLACED_ROLES)
    counts = {role: _count(path, RAY, role, value) for role, value in values.items()}
    if not any(counts.values()):
        raise ConfigError(f"{path}: {RAY}: Ray has nothing to place; add a role, such as decode: 1")
    return {role: number for role, number in counts.items() if number}


def _check_placed(found: ClusterFile) -> None:
    """Raise ConfigError if Ray cannot place what it is to place."""
    for machine in found.machines:
        if machine.counts.get(RAY) and not found.placed:
            raise ConfigError(
                f"{found.path}: machines: {machine.name}: {RAY}: Ray has nothing to place; say "
                f"what it places at the top of the file, such as `{RAY}: {{decode: 1}}`"
            )
        for role in found.placed:
            if machine.counts.get(role):
                raise ConfigError(
                    f"{found.path}: machines: {machine.name}: {role}: Ray places the workers of "
                    f"this role; add them to its number, {RAY}: {role}"
                )
    if found.placed and not found.ray_hosts:
        raise ConfigError(
            f"{found.path}: {RAY}: no machine takes what Ray places; leave out `{RAY}: 0` at one"
        )
    if found.placed and found.stage_hosts:
        raise ConfigError(
            f"{found.path}: {RAY}: Ray places engines whose stages are all on one machine; leave "
            f"out `{STAGE}`, or give the engines to machines instead of Ray"
        )
    for role in found.placed:
        if found.value_of(_SHARING, role) != 1:
            raise ConfigError(
                f"{found.path}: {RAY}: {role}: Ray places each worker by itself, and with "
                f"{flag(_SHARING)} several share their experts; leave that out"
            )


def _check(found: ClusterFile) -> None:
    _check_placed(found)
    for role, why in (("gateway", "clients ask one"), ("decode", "no tokens come without")):
        if not found.total(role):
            raise ConfigError(
                f"{found.path}: machines: none has the role {role}, and {why}; add `{role}: 1` to "
                "one"
            )
    labels = [machine.labels for machine in found.machines if machine.labels]
    for own in labels:
        if labels.count(own) > 1:
            raise ConfigError(
                f"{found.path}: machines: two have the labels {','.join(own)}; give each its own"
            )
    addresses = [machine.address for machine in found.machines]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(
                f"{found.path}: machines: two have the address {address}; give each its own"
            )
        if is_loopback(address) and len(addresses) > 1:
            raise ConfigError(
                f"{found.path}: machines: {address} is reached only from its own machine; give an "
                "address that the others reach"
            )


def _machine(path: str, name: str, told: object, *, by_ray: bool) -> Machine:
    where = f"machines: {name}"
    if not _NAME.fullmatch(name) or name == SAFE:
        raise ConfigError(
            f"{path}: {where}: a folder gets this name; use only letters, digits, '.', '_' and "
            f"'-', and not {SAFE}"
        )
    values = _mapping(path, where, told, _MACHINE)
    if not isinstance(values.get("address"), str):
        raise ConfigError(
            f"{path}: {where}: address: the address is missing; give the one by which other "
            "machines reach this one"
        )
    counts = {
        role: _count(path, where, role, values[role])
        for role in (*ROLES, STAGE, RAY)
        if role in values
    }
    if by_ray:
        counts.setdefault(RAY, 1)
    if not any(counts.values()):
        raise ConfigError(f"{path}: {where}: no role runs there; add one, such as decode: 1")
    if counts.get("kvstore", 0) > 1:
        raise ConfigError(
            f"{path}: {where}: kvstore: a machine has one pool node at most; give that one more "
            "DRAM"
        )
    if counts.get(STAGE, 0) > 1:
        raise ConfigError(
            f"{path}: {where}: {STAGE}: one process computes the stages of all engines there; give "
            "1"
        )
    if counts.get(RAY, 0) > 1:
        raise ConfigError(f"{path}: {where}: {RAY}: a machine is one node of Ray; give 1 or 0")
    try:
        labels = options.labels(LABELS, values[LABELS]) if LABELS in values else ()
    except ConfigError as error:
        raise ConfigError(f"{path}: {where}: {error.message}") from error
    return Machine(name=name, address=str(values["address"]), counts=counts, labels=labels)


def _count(path: str, where: str, role: str, value: object) -> int:
    try:
        return int(count(0, 64)(role, value))
    except ConfigError as error:
        raise ConfigError(f"{path}: {where}: {error.message}") from error


def _settings(path: str, group: str, told: object) -> dict[str, object]:
    known = options.options_of(ServeConfig)
    found = {}
    for key, value in ({} if told is None else _mapping(path, group, told, None)).items():
        name = str(key).replace("-", "_")
        if name in _DECIDED:
            raise ConfigError(f"{path}: {group}: {flag(name)} follows from the rest of this file")
        if name not in known:
            raise ConfigError(f"{path}: {group}: {unknown_setting(str(key))}")
        if _option(name).secret and isinstance(_only(value), list | dict):
            raise ConfigError(
                f"{path}: {group}: {flag(name)}: give one value here; a file, such as "
                "api-keys-file, holds several"
            )
        found[name] = value
    return found


def _mapping(path: str, where: str, told: object, known: tuple[str, ...] | None) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ConfigError(f"{path}: {where}: must hold `name: value` lines")
    for key in told:
        if known is not None and key not in known:
            raise ConfigError(
                f"{path}: {where}: unknown key {key!r}{options.nearest(str(key), known)}; one of "
                f"{', '.join(known)}"
            )
    return told


def _option(name: str) -> options.Option:
    option, _ = options.options_of(ServeConfig)[name]
    return option


def _only(value: object) -> object:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _flags(name: str, value: object) -> list[str]:
    """Return a setting as it is typed."""
    option = _option(name)
    if option.positional:
        return [str(value)]
    if option.switch:
        return [f"--{flag(name)}" if option.read(name, value) else f"--no-{flag(name)}"]
    if isinstance(value, list):
        return [f"--{flag(name)}={each}" for each in value]
    written = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{flag(name)}={written}"]
