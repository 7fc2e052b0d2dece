"""Makes one machine of a cluster that a file describes a node of Ray: `mooncake up` runs this as a
process of its own where the file has Ray place workers.

One of these processes is Ray's head and has Ray place the workers; the others join it. Each ends
when its Ray ends or another head counts, and `mooncake up` starts it again: it then looks anew for
the head, or becomes it. Workers outlive all that, and whoever is the head next adopts them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

import msgspec

from mooncake.base import ConfigError, MooncakeError, Role
from mooncake.identity.credential import Credential
from mooncake.launch.cluster.facts import ClusterFacts, read_facts
from mooncake.launch.cluster.log_file import start_log
from mooncake.launch.cluster.ray_machines import placed_worker
from mooncake.launch.cluster.supervision.supervisor import Supervisor
from mooncake.launch.cluster.up import machine_credential, own_machine, placed_limit_s
from mooncake.launch.config.cluster_file import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    RAY_PORT,
    RAY_TOKEN,
    ClusterFile,
    Machine,
    read_cluster_file,
)
from mooncake.launch.config.config import resolve
from mooncake.launch.config.options import bracketed
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.descendants import Descendants
from mooncake.launch.host.secrets.credentials import private_dir
from mooncake.launch.host.seeds import Seeds
from mooncake.launch.worker.settings import WorkerSettings

CONNECT_S = 1.0
LOOK_S = 2.0
"""Seconds between two looks at other machines."""
TURN_S = 60.0
"""If no machine is the head for so long, the first in the file becomes it; each further one waits
so much longer than the one before.
"""
LOST_S = 10.0
"""A head that does not answer for this long is lost."""
AWAY_S = 30.0
"""A new head waits this long for machines on which no gateway knows workers."""
ASK_S = 0.25
"""Seconds until Ray and the gateways are asked again which machines are there."""
AGENTS_S = 0.5
"""Ray's helpers get this long to end by themselves."""

_log = logging.getLogger(__name__)


def whom_to_join(own: int, heads: Sequence[bool], silent_s: float) -> int | None:
    """Return the machine whose Ray the others join, by its place in the file, or None if this
    machine must wait and ask again.

    `own`: the place of this machine. `heads`: which machines are heads now. `silent_s`: for how
    long none has been.
    """
    for place, is_head in enumerate(heads):
        if is_head and place != own:
            return place
    return own if silent_s >= own * TURN_S else None


def gives_way(own: int, heads: Sequence[bool]) -> bool:
    """Return whether the head at this place of the file gives way to another one: both became heads
    when they did not reach each other.
    """
    return any(heads[:own])


def works_at(
    members: Iterable[tuple[Role, str]], roles: Container[str], machines: Container[str]
) -> bool:
    """Return whether a member of the cluster that has one of these roles is on one of the
    machines.
    """
    return any(role.value in roles and name in machines for role, name in members)


def run_node(file: str, name: str | None) -> int:
    """Be the machine's node of Ray until a signal, or until its Ray ends; return the exit code.

    Raises:
        MooncakeError: this machine is not in the file, or has no Ray.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray: Ray is not installed here: pip install 'mooncake-serve[ray]'")
    path = Path(file).resolve()
    cluster = read_cluster_file(str(path))
    machine = own_machine(cluster, name)
    os.chdir(path.parent)
    environ = environment.with_ray_tls(environment.variables(), CERTIFICATE, KEY, AUTHORITY)
    environ["RAY_AUTH_TOKEN_PATH"] = str(Path(RAY_TOKEN).absolute())
    environ |= {placed_worker.FILE: str(path), placed_worker.MACHINE: machine.name}
    environment.prepare_ray(environ, here_only=False)
    node = _Node(cluster, machine)
    try:
        node.run()
    except MooncakeError as error:
        _log.error("%s", error.message)
        return 1
    return 0


class _Node:
    """One life of the node."""

    def __init__(self, cluster: ClusterFile, machine: Machine) -> None:
        self._cluster = cluster
        self._machine = machine
        self._hosts = cluster.ray_hosts
        self._own = self._hosts.index(machine.address)
        self._parent = os.getppid()
        self._num_signals = 0
        self._looked_s = float("-inf")
        config = self._config()
        start_log("ray", config.log_level, config.log_format, config.log_file)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        """Join the head, or be it, until that ends. After a signal the workers of this machine
        leave; but if `mooncake up` was killed, they wait for the next one.
        """
        raylet: OwnRaylet | None = None
        try:
            if (head := self._await_head()) is None:
                return
            is_own = head == self._own
            address = _address(self._hosts[head])
            raylet = OwnRaylet(
                address, self._machine.address, lambda: self._num_signals > 0, head=is_own
            )
            if is_own:
                _log.info("this machine is the head of Ray")
                self._be_head(address, raylet)
            else:
                self._be_node(self._hosts[head], raylet)
        finally:
            if raylet is not None:
                raylet.close()
            if self._num_signals and os.getppid() == self._parent:
                names = [name for _, name in placed_worker.names_of(self._cluster)]
                limit_s = placed_limit_s(self._cluster, self._machine)
                placed_worker.leave(names, limit_s, lambda: self._num_signals > 1)

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1

    def _await_head(self) -> int | None:
        """Return the machine that is the head, by its place, or None if a signal came."""
        began_s = time.monotonic()
        while not self._num_signals:
            heads = [_is_head(host) for host in self._hosts]
            found = whom_to_join(self._own, heads, time.monotonic() - began_s)
            if found is not None:
                return found
            time.sleep(LOOK_S)
        return None

    def _be_node(self, head: str, raylet: OwnRaylet) -> None:
        seen_s = time.monotonic()
        while not self._num_signals and not raylet.has_ended():
            if _is_head(head):
                seen_s = time.monotonic()
            elif time.monotonic() > seen_s + LOST_S:
                break
            time.sleep(LOOK_S)
        if not self._num_signals:
            lost = "Ray here" if raylet.has_ended() else f"the head of Ray at {head}"
            _log.warning("%s is lost; the workers of this machine serve on", lost)

    def _be_head(self, address: str, raylet: OwnRaylet) -> None:
        from mooncake.launch.cluster.ray_machines import ray_cluster

        def go_on() -> bool:
            return self._goes_on(raylet)

        ray_cluster.connect(address)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray sets its own
            signal.signal(number, self._on_signal)
        try:
            config = self._config()
            while facts := self._await_others(config, go_on):
                supervisor = Supervisor(
                    lambda _: None, orphan_s=config.orphan_timeout, daemons=ray_cluster.daemons()
                )
                try:
                    self._place(supervisor, facts, go_on)
                except MooncakeError as error:  # without an end of Ray: its start takes longer
                    _log.warning("the workers are not placed, trying again: %s", error.message)
                if supervisor.keepers_are_gone:
                    supervisor.forget()
                    break
                supervisor.let_go()
        finally:
            with Descendants() as descendants:
                ray_cluster.disconnect()
                descendants.end(AGENTS_S)

    def _place(
        self, supervisor: Supervisor, facts: ClusterFacts, go_on: Callable[[], bool]
    ) -> None:
        """Have Ray place the workers, and watch them until a machine or its Ray is lost: workers
        that no longer run are then placed on others.
        """
        from mooncake.launch.cluster.ray_machines import ray_cluster

        workers = [self._worker(facts, *each) for each in placed_worker.names_of(self._cluster)]
        there = ray_cluster.nodes()
        held = ray_cluster.holders(placed_worker.held, [each.worker_id for each in workers])
        groups = ray_cluster.groups_of_held(workers, held)
        try:
            keepers = ray_cluster.RayKeepers("up", placed=True, groups=groups)
            supervisor.resume(workers, keepers.spread_over(workers, held, [*there]))
        finally:
            ray_cluster.give_back(groups.values())
        looked_s = time.monotonic()
        told = False

        def all_stay() -> bool:
            nonlocal looked_s, told
            if not told and supervisor.are_ready():
                told = True
                _log.info("Ray looks after %s", ", ".join(each.worker_id for each in workers))
            if time.monotonic() > looked_s + LOOK_S:
                looked_s = time.monotonic()
                if lost := there.keys() - ray_cluster.nodes().keys():
                    names = ", ".join(sorted(there[node] for node in lost))
                    _log.warning(
                        "the Ray of %s is lost; other machines are asked for its workers", names
                    )
                    return False
            return go_on()

        supervisor.watch(go_on=all_stay)

    def _goes_on(self, raylet: OwnRaylet) -> bool:
        """Return whether this machine is still the head."""
        if self._num_signals or raylet.has_ended():
            return False
        if time.monotonic() > self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            if gives_way(self._own, [_is_head(host) for host in self._hosts[: self._own]]):
                _log.warning(
                    "this machine ends as head of Ray: one before it in the file is a head, too"
                )
                return False
        return True

    def _worker(self, facts: ClusterFacts, role: Role, worker_id: str) -> WorkerSettings:
        """Return what the supervisor must know of a worker; its machine makes its settings."""
        from mooncake.launch.cluster.ray_machines import ray_cluster

        config = self._config(role)
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        on_gpus = config.device != "cpu" and ray_cluster.num_gpus() > 0
        return msgspec.structs.replace(
            facts.worker, role=role, worker_id=worker_id, num_gpus=ranks * on_gpus,
            expert_group=None,
        )  # fmt: skip

    def _await_others(self, config: ServeConfig, go_on: Callable[[], bool]) -> ClusterFacts | None:
        """Wait until a gateway has said how the cluster works, and until the machines are nodes of
        Ray: those on which gateways know workers for as long as they do, the others `AWAY_S` at
        most. Return what the gateway said, or None if this process must end.
        """
        from mooncake.launch.cluster.ray_machines import ray_cluster

        end_s = time.monotonic() + AWAY_S
        credential: Credential = machine_credential(self._machine, Path())
        own = config.bind_host, config.bind_ports
        with contextlib.closing(Seeds(config.seeds, credential, *own)) as seeds:
            while go_on():
                answers, here = seeds.ask(), {*ray_cluster.nodes().values()}
                away = {
                    machine.name for machine in self._cluster.machines
                    if machine.address in self._hosts and machine.address not in here
                }  # fmt: skip
                if answers and (not away or time.monotonic() > end_s):
                    members = [member for told in answers for member in told.members]
                    if not works_at(members, self._cluster.placed, away):
                        return read_facts(answers[0].facts)
                time.sleep(ASK_S)
        return None

    def _config(self, role: Role | None = None) -> ServeConfig:
        """Return the settings of workers of a role that Ray places."""
        name = next(iter(self._cluster.placed)) if role is None else role.value
        return resolve(dict(self._cluster.placed_part(self._machine, name).given), None, {})


def _address(host: str) -> str:
    return f"{bracketed(host)}:{RAY_PORT}"


def _is_head(host: str) -> bool:
    """Return whether a head of Ray listens on a machine."""
    try:
        socket.create_connection((host, RAY_PORT), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


START_S = 180.0
"""`ray start` may take this long to report that it runs."""
STOP_S = 10.0
POLL_S = 0.05
STARTED = "Ray runtime started"
OBJECT_STORE_BYTES = 100 * 2**20
"""Ray insists on an object store; we never put anything there."""
SHOWN_LINES = 3
_PROGRAM = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "from ray.scripts.scripts import main; main()"
)
"""A program that ends Ray when its starter ends in any way. Ray alone would go on, and keep its
port.
"""


class OwnRaylet:
    """The raylet of this machine, which ends with the process that starts it."""

    def __init__(
        self, address: str, bind_host: str, stops: Callable[[], bool], *, head: bool = False
    ) -> None:
        """Start the raylet for the cluster at `address`. `bind_host` is this machine's address
        there. `stops`: whether to give up. `head`: the cluster begins here, at that address.

        Raises:
            ConfigError: Ray does not start.
            MooncakeError: `stops` has returned true.
        """
        log = private_dir() / f"raylet-{os.getpid()}.log"
        words = [
            "start", "--block", "--disable-usage-stats", "--num-cpus=0",
            f"--num-gpus={machine_facts.num_gpus()}",
            f"--node-ip-address={bind_host}", f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={private_dir()}",  # others could read its logs otherwise
        ]  # fmt: skip
        if head:
            port = address.rpartition(":")[2]
            words += ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        else:
            words.append(f"--address={address}")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._log = log
        try:
            self._await_start(address, stops)
        except BaseException:
            self.close()
            raise
        _log.info("Ray runs on this machine, as part of the cluster at %s", address)

    def _await_start(self, address: str, stops: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while STARTED not in (said := self._log.read_text(errors="replace")):
            if stops():
                raise MooncakeError("stopped while Ray was starting on this machine")
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                lines = [line.strip() for line in said.splitlines() if line.strip()]
                raise ConfigError(
                    f"ray: Ray does not start on this machine for the cluster at {address}: "
                    f"{' / '.join(lines[-SHOWN_LINES:]) or 'it printed nothing'}. Both machines "
                    "need the same version of Ray and the same token in ~/.ray/auth_token"
                )
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Return whether the raylet, or another process of Ray here, has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)
