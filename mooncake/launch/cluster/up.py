"""`mooncake up` starts the processes of one machine of a cluster, restarts those that end, and ends
all with itself.

Owns its children. They find those of other machines by themselves, so its end affects only its own
machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from mooncake.base import ConfigError, MooncakeError, format_bytes
from mooncake.base.messages import ClusterTold
from mooncake.identity.certificates import names_in
from mooncake.identity.credential import Credential, own_credential
from mooncake.launch.cluster.workers import check_transport
from mooncake.launch.config.cluster_file import (
    CERTIFICATE,
    RAY,
    ROLES,
    STAGE,
    ClusterFile,
    Machine,
    Part,
    read_cluster_file,
)
from mooncake.launch.config.config import resolve
from mooncake.launch.config.options import bracketed
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.launch.host.seeds import Seeds

POLL_S = 0.2
WELL_S = 60.0
"""A process that ran for this long is restarted at once. One that ends sooner is restarted after a
wait that grows each time.
"""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
END_S = 15.0
"""Time that a process gets to end, beyond its own limit."""
REMIND_S = 60.0
SILENCE_S = 10.0
"""Gateways that have not answered for this long count as missing."""
CANNOT = 2
"""The exit code of a process that can never start with its settings."""
_CHILD = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "from mooncake.cli.main import program; program()"
)


@dataclasses.dataclass
class _Child:
    part: Part
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    wait_s: float = 0.0
    """The wait before its last start, when it had ended early."""
    retry_at_s: float = float("-inf")


def own_machine(cluster: ClusterFile, name: str | None, labels: Collection[str] = ()) -> Machine:
    """Return the entry for this machine: the one with the given name; or all of whose labels are
    among those given; or, without labels, the one with its host name or one of its addresses.

    Raises:
        ConfigError: the file names no such machine, or several have such labels.
    """
    if name is None and labels:
        return _labelled(cluster, labels)
    host = machine_facts.host_name()
    for machine in cluster.machines:
        if machine.name == (name or host):
            return machine
    if name is None:
        for machine in cluster.machines:
            with contextlib.suppress(ConfigError):
                machine_facts.check_port(machine.address, 0)
                return machine
    named = ", ".join(f"{machine.name} ({machine.address})" for machine in cluster.machines)
    raise ConfigError(
        f"{cluster.path}: {name or host} is none of its machines: {named}; and none of their "
        "addresses is one of this machine. Say which one it is: --machine NAME"
    )


def _labelled(cluster: ClusterFile, labels: Collection[str]) -> Machine:
    """Return the machine all of whose labels are among these. Raises ConfigError if there is not
    exactly one.
    """
    fitting = [each for each in cluster.machines if each.labels and {*each.labels} <= {*labels}]
    if len(fitting) == 1:
        return fitting[0]
    shown = fitting or cluster.machines
    named = ", ".join(f"{each.name} ({','.join(each.labels) or 'no labels'})" for each in shown)
    fit = "several machines fit" if fitting else "none of its machines fits"
    raise ConfigError(
        f"{cluster.path}: {fit} the labels {','.join(labels)}: {named}. A machine fits if it has "
        "labels in the file and all of them are given; correct them, or say --machine NAME"
    )


def machine_credential(machine: Machine, folder: Path) -> Credential:
    """Return what proves the machine: the credential of one of its processes.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    file, kind = next(iter(machine.credentials.items()))
    return own_credential(read_secret(folder / file), kind)


def placed_limit_s(cluster: ClusterFile, machine: Machine) -> float:
    """Return how long what Ray has placed on a machine may take to end, or 0 if Ray places nothing
    there.
    """
    roles = cluster.placed if machine.counts.get(RAY) else ()
    parts = [cluster.placed_part(machine, role) for role in roles]
    limits = [resolve(dict(part.given), None, {}).shutdown_timeout for part in parts]
    return max(limits, default=0.0)


def plan_parts(cluster: ClusterFile, machine: Machine) -> list[tuple[Part, ServeConfig, ServePlan]]:
    """Return what each process of a machine will do, and check that all fit there together. Stages
    of engines on other machines are not among them: those engines plan them; nor what Ray places,
    of which each kind has to fit alone. Call it in the folder of the file.

    Raises:
        ConfigError: a setting is wrong, a file is missing, or the machine is too small.
    """
    own = Path(CERTIFICATE)
    if own.is_file() and machine.address not in (names := names_in(own.read_text())):
        raise ConfigError(
            f"{CERTIFICATE}: it belongs to {', '.join(names)}, and {machine.name} is "
            f"{machine.address}; copy the folder of this machine here"
        )
    for file in machine.bundle:
        if not Path(file).is_file():
            raise ConfigError(
                f"{file}: it is not beside {cluster.path.name}; `mooncake cluster init` makes a "
                f"folder with it for {machine.name}: copy that folder here"
            )
    machine_facts.check_port(machine.address, 0, "address")
    if not Path(cluster.model).is_dir():
        raise ConfigError(
            f"model: {cluster.model} is not a directory on {machine.name}; copy the checkpoint "
            "there"
        )
    cores, planned = machine_facts.num_cores(), []
    for part in cluster.parts(machine):
        if part.role not in (STAGE, RAY):
            planned.append((part, *_planned(machine, part, cores)))
    _check_memory(machine, [(part, plan) for part, _, plan in planned])
    for role in cluster.placed if machine.counts.get(RAY) else ():
        _planned(machine, cluster.placed_part(machine, role), cores)
    return planned


def _planned(machine: Machine, part: Part, cores: int) -> tuple[ServeConfig, ServePlan]:
    """Return the plan of a process. Raises ConfigError if it cannot run."""
    try:
        config = resolve({**part.given, "dry_run": True}, None, {})
        if part.role != "gateway":
            check_transport(config)
        plan = make_plan(config, cores)
        if plan.refusal:
            raise ConfigError(plan.refusal)
        return config, plan
    except ConfigError as error:
        raise ConfigError(f"{part.name} of {machine.name}: {error.message}") from error


def _check_memory(machine: Machine, planned: Sequence[tuple[Part, ServePlan]]) -> None:
    available = machine_facts.available_bytes()
    wanted = {
        part.name: plan.total_bytes
        for part, plan in planned
        if part.role == "kvstore" or plan.options.device == "cpu"
    }
    total = sum(wanted.values())
    if available is not None and total > available:
        each = ", ".join(f"{name} {format_bytes(size)}" for name, size in wanted.items() if size)
        raise ConfigError(
            f"{machine.name} has {format_bytes(available)} of memory free, and its processes need "
            f"{format_bytes(total)} ({each}): run fewer there, or give them less"
        )


def _children(
    machine: Machine, planned: list[tuple[Part, ServeConfig, ServePlan]], others: list[Part]
) -> list[_Child]:
    """Return the processes with the cores and GPUs that each gets. others: those that start engines
    or stages when asked, with the GPUs that are left.

    Raises:
        ConfigError: there are not enough GPUs.
    """
    environ = dict(environment.variables())
    engines = [(part, plan) for part, _, plan in planned if plan.num_engines]
    ranks = sum(plan.num_ranks for _, plan in engines)
    on_gpus = sum(plan.num_ranks for _, plan in engines if plan.options.device == "cuda")
    gpus = machine_facts.seen_gpus()
    if on_gpus > len(gpus):
        raise ConfigError(
            f"{machine.name} has {len(gpus)} GPUs, and the ranks of its engines need {on_gpus}: "
            "run fewer engines there"
        )
    threads = max(1, machine_facts.num_cores() // max(1, ranks))
    children = []
    for part, config, plan in planned:
        own = environ | part.environ
        given = dict(part.given)
        if plan.num_engines and config.num_threads is None:
            given["num_threads"] = threads
        if plan.num_engines and plan.options.device == "cuda":
            own[environment.SEEN_GPUS] = ",".join(gpus[: plan.num_ranks])
            del gpus[: plan.num_ranks]
        children.append(_Child(dataclasses.replace(part, given=given), own))
    left = {environment.SEEN_GPUS: ",".join(gpus)} if on_gpus else {}
    return [*children, *(_Child(part, environ | left) for part in others)]


class Up:
    """Starts the processes of a machine and restarts those that end, until a signal comes."""

    def __init__(
        self,
        cluster: ClusterFile,
        machine: Machine,
        children: list[_Child],
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._machine = machine
        self._children = children
        self._say = say
        self._num_signals = 0
        self._missing: dict[str, int] | None = None
        self._refusal = ""
        self._said_s = self._answered_s = float("-inf")

    def run(self, seeds: Seeds, limit_s: float) -> int:
        """Start and watch the processes; return the exit code. `limit_s`: how long each may take to
        end.

        Raises:
            MooncakeError: a process can never start with the settings in the file.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            while not self._num_signals:
                for child in self._children:
                    self._look_at(child)
                self._tell(self._answers(seeds))
                time.sleep(POLL_S)
        finally:
            self._end(limit_s)
        return 0

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1

    def _answers(self, seeds: Seeds) -> list[ClusterTold]:
        """Return the gateways' answers. A gateway that refuses ends no process here."""
        try:
            return seeds.ask(len(seeds.addresses))
        except MooncakeError as error:
            if error.message != self._refusal:
                self._refusal = error.message
                self._say(error.message)
            return []

    def _look_at(self, child: _Child) -> None:
        """Start a process that does not run: at once, or a while after it ended."""
        now_s, name = time.monotonic(), child.part.name
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                return
            first = child.retry_at_s == float("-inf")  # later, what it lacks may come back
            if code == CANNOT and first and now_s - child.started_s < WELL_S:
                raise MooncakeError(
                    f"{name} cannot start on {self._machine.name}; it says why above"
                )
            early = now_s - child.started_s < WELL_S
            longer_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * child.wait_s))
            child.wait_s = longer_s if early else 0.0
            child.retry_at_s, child.process = now_s + child.wait_s, None
            self._say(f"{name} has ended ({_fate(code)}) and starts again in {child.wait_s:.1f} s")
        if now_s >= child.retry_at_s:
            child.started_s = now_s
            child.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *child.part.words],
                stdin=subprocess.DEVNULL, env=child.environ,
                process_group=0,  # else Ctrl-C reaches it too, and our SIGTERM is its second signal
            )  # fmt: skip

    def _tell(self, answers: Sequence[ClusterTold]) -> None:
        """Print which members of the cluster are still missing, when that has changed and now and
        then.
        """
        now_s = time.monotonic()
        if answers:
            self._answered_s = now_s
        elif now_s < self._answered_s + SILENCE_S:
            return
        missing = self._cluster.missing(told.members for told in answers)
        if missing == self._missing and (not missing or now_s < self._said_s + REMIND_S):
            return
        self._missing, self._said_s = missing, now_s
        if missing:
            self._say("waiting for " + "; ".join(self._named(missing)))
            return
        port = self._cluster.value_of("port", "gateway")
        urls = [
            f"https://{bracketed(machine.address)}:{port + index}/v1"
            for machine in self._cluster.machines
            for index in range(machine.counts.get("gateway", 0))
        ]
        self._say(f"all processes of {self._cluster.path.name} are here: {' '.join(urls)}")

    def _named(self, missing: dict[str, int]) -> Iterator[str]:
        for machine in self._cluster.machines:
            own = [name for name in self._cluster.members(machine) if name in missing]
            if own:
                what = ", ".join(name.partition("@" if "@" in name else "-")[0] for name in own)
                yield f"{machine.name} ({machine.address}): {what}"
        if placed := [name for name in self._cluster.placed if name in missing]:
            yield f"what Ray places: {', '.join(placed)}"

    def _end(self, limit_s: float) -> None:
        """Ask all processes to leave, and kill those that do not. A second signal hurries them."""
        running = [child.process for child in self._children if child.process is not None]
        num_sent, end_s = 0, time.monotonic() + limit_s + END_S
        while any(process.poll() is None for process in running):
            if time.monotonic() > end_s:
                for process in running:
                    process.kill()
            elif num_sent < max(1, min(2, self._num_signals)):
                num_sent += 1
                for process in running:  # the kernel may repeat SIGTERM; see `EndSignals`
                    process.send_signal(signal.SIGTERM if num_sent == 1 else signal.SIGINT)
            time.sleep(POLL_S)


def _fate(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def asking(cluster: ClusterFile, machine: Machine, credential: Credential) -> Seeds:
    """Return what asks the gateways of a cluster for a machine. A firewall may let them answer to
    its ports alone.
    """
    role = next((role for role in ROLES if machine.counts.get(role)), STAGE)
    return Seeds(cluster.seeds, credential, machine.address, cluster.value_of("bind_ports", role))


def up(
    file: str,
    name: str | None,
    say: Callable[[str], None],
    *,
    labels: Collection[str] = (),
    dry_run: bool = False,
) -> int:
    """Be one machine of the cluster that a file describes, until a signal; return the exit code.
    `name`, `labels`: see `own_machine`. `dry_run`: only check, and print what would be started.

    Raises:
        MooncakeError: this machine is not in the file, or cannot run what the file says.
    """
    machine_facts.check_system()
    path = Path(file)
    cluster = read_cluster_file(file)
    machine = own_machine(cluster, name, labels)
    os.chdir(path.resolve().parent)
    planned = plan_parts(cluster, machine)
    others = [part for part in cluster.parts(machine) if part.role in (STAGE, RAY)]
    children = _children(machine, planned, others)
    say(f"{machine.name}: {', '.join(child.part.name for child in children)}")
    if dry_run:
        for child in children:
            secrets = [f"{name}=..." for name in child.part.environ]
            say(" ".join([*secrets, "mooncake", *child.part.words]))
        return 0
    limits = [config.shutdown_timeout for _, config, _ in planned]
    limits += [cluster.value_of("shutdown_timeout", STAGE), placed_limit_s(cluster, machine)]
    credential = machine_credential(machine, Path())
    following = SecretFollower(next(iter(machine.credentials)), credential.renew)
    with (
        contextlib.closing(following),
        contextlib.closing(asking(cluster, machine, credential)) as seeds,
    ):
        return Up(cluster, machine, children, say).run(seeds, max(limits))
