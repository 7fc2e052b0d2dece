"""Runs workers as Ray actors: places, watches and restarts them. The only module that imports ray.

Ray carries neither tokens nor KV nor the cluster secret: nobody who reads its store or relays its
connections learns the secret. An actor supervises a worker's process, which outlives it. The death
of the process shows twice: at once by its descriptor on this machine, and a little later by the
failed Ray call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import select
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from mooncake.base import ConfigError, MooncakeError, Role, SystemIds, Unreachable
from mooncake.launch.cluster.facts import without_secret
from mooncake.launch.cluster.followed_load import LoadFollower
from mooncake.launch.cluster.own_raylet import OBJECT_STORE_BYTES
from mooncake.launch.cluster.worker_handle import Begin, Told, WorkerHandle, fingerprint, place_of
from mooncake.launch.config.config import WILDCARDS
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.credentials import (
    keep_ray_token_private,
    private_dir,
    read_secret,
)
from mooncake.launch.host.descendants import Descendants, has_ended
from mooncake.launch.host.fork_server import ForkServer
from mooncake.launch.host.secret_file import SECRET_FILE
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.scheduler.scaling.config import ROLES

_log = logging.getLogger(__name__)

_groups: Any = importlib.import_module("ray.util.placement_group")
"""Ray declares no types for these."""

NAMESPACE = "mooncake"
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
"""Ray must answer within this time."""
AGENTS_S = 0.5
"""Ray's helpers get this long to end by themselves."""
POLL_S = 0.2
START_POLL_S = 0.05
"""The wait in each step while workers start."""
HOLDERS_S = 60.0
"""A machine may take this long to start a process that says which workers run there."""
PLACE_S = 10.0
"""Ray may take this long to reserve what a worker needs."""
HERE_SHARE = 0.001
"""Share of the resource that stands for one machine: a bundle that asks for it is placed there."""
STOP_S = 10.0
"""A worker that has not stopped by itself after this long is killed."""
SAVE_S = 5.0
"""Part of that time in which a pool node may write to its disks what is worth keeping."""
DAEMONS = ("gcs_server", "raylet")
"""The names of Ray's processes that nothing replaces."""
MAX_EARLY_DEATHS = 3
"""After this many deaths in a row before a worker was ready, restarts are considered useless."""
LONGEST_WAIT_S = 30.0
"""The longest wait before a worker that cannot start is tried again."""
MOST_STEPS = 5
"""The wait grows this many times; it is the longest one then."""


class State(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    """0: there is none yet."""
    boot_id: str
    """The boot id of the machine that it runs on."""
    what: str
    done: int
    whole: int
    ready: bool


class WorkerEnded(Exception):
    """The process of a worker has ended, and nobody told it to."""


class WorkerActor:
    """Supervises the process of one worker for Ray. `run` blocks in one thread; the other methods
    answer beside it.
    """

    def __init__(self, worker_id: str, *, placed: bool = False, node: str | None = None) -> None:
        """`placed`: the cluster's file on the actor's machine says what the worker is. `node`: the
        node of Ray on which the worker runs or is to start; None: any.
        """
        self._worker_id = worker_id
        self._placed = placed
        self._node = node
        self._told = Told()
        self._handle: WorkerHandle | None = None
        self._lock = threading.Lock()
        self._leaving: tuple[float, bool] | None = None
        """Set once the worker is to stop: see `stop`."""
        self._is_pool = False

    def __repr__(self) -> str:
        """Return what Ray puts before each line of the log."""
        return self._worker_id

    def run(self, encoded: bytes, secret_file: str, run: str, orphan_s: float) -> str | None:
        """Start the worker's process, or adopt it if it runs, and return when it has ended: None,
        or why the worker cannot start.

        `secret_file`: the file of the cluster secret on the supervisor's machine. Other machines
        have the secret in the environment of their Ray. `run`: the name of the run of `mooncake
        serve` that the worker belongs to. `orphan_s`: see `Begin`.

        Raises:
            WorkerEnded: the process has ended by itself.
        """
        if self._node is not None and self._node != ray.get_runtime_context().get_node_id():
            # Where a node has just joined, others may not know it yet, and Ray takes another one.
            # The worker may run there, so it must not start here: Ray tries again.
            os._exit(1)
        settings = msgspec.msgpack.decode(encoded, type=WorkerSettings)
        self._is_pool = settings.role is Role.KVSTORE
        handle: WorkerHandle | None = None
        try:
            if self._placed:
                from mooncake.launch.cluster import placed_worker

                place, begin = placed_worker.begin(settings.role, settings.worker_id)
            else:
                place = place_of(run, settings.worker_id)
                begin = _begin(settings, Path(secret_file), orphan_s)
            handle = WorkerHandle(place, begin)
            with self._lock:
                self._handle = handle
            if self._leaving is not None:
                self.stop(*self._leaving)
            told: Told | None = handle.first
            while told is not None:
                if told.refusal:
                    return told.refusal
                self._told = told
                told = handle.receive()
        except MooncakeError as error:
            return error.message
        finally:
            self._told = Told()
            with self._lock:
                self._handle = None
            if handle is not None:
                handle.close()
        if self._leaving is None:
            raise WorkerEnded(settings.worker_id)
        return None

    def state(self) -> bytes:
        told = self._told
        state = State(
            told.pid, machine_facts.boot_id(), told.what, told.done, told.whole, told.ready
        )
        return msgspec.msgpack.encode(state)

    def stop(self, drain_s: float, waits: bool) -> None:
        """End `run`, once what the worker does has ended or `drain_s` have passed. `waits`: see
        `Worker.leave`. A pool node that is told so again saves nothing any more.
        """
        with self._lock:
            limit_s = SAVE_S if self._is_pool and self._leaving is None else drain_s
            self._leaving = drain_s, waits
            if self._handle is not None:
                self._handle.leave(limit_s, waits=waits)


@dataclasses.dataclass(eq=False)
class _Entry:
    """What the supervisor knows about one worker."""

    settings: WorkerSettings
    actor: Any
    run: Any
    """The Ray call that lasts as long as the worker."""
    aside: PlacementGroup | None = None
    """What is reserved for all its ranks; it stays reserved while it starts again."""
    state_call: Any = None
    state: State | None = None
    pidfd: int | None = None
    lost: bool = False
    """True if its death was reported and it has not been heard of since."""
    early_deaths: int = 0
    retry_at_s: float | None = None
    leave_by_s: float | None = None
    """When a worker that was told to leave ends at the latest; None: it was not told."""

    @property
    def leaves(self) -> bool:
        """True if it was told to leave, and does not start again."""
        return self.leave_by_s is not None

    @property
    def serves(self) -> bool:
        """True if it is ready, and has not ended since."""
        return self.state is not None and self.state.ready and not self.lost


def _begin(settings: WorkerSettings, secret_file: Path, orphan_s: float) -> Begin:
    """Return what a worker's process on this machine is told."""
    secret, file = _secret_here(secret_file)
    return Begin(
        settings=settings, secret=secret, secret_file=None if file is None else str(file),
        advertise_host=_own_address(settings.bind_host), fingerprint=fingerprint(settings),
        orphan_s=orphan_s,
    )  # fmt: skip


def _secret_here(file: Path) -> tuple[str, Path | None]:
    """Return the cluster secret for a worker on this machine, and the file that holds it, if any.

    Raises:
        ConfigError: no secret was given here.
    """
    given = os.environ.get(SECRET_FILE)
    if file.exists() or given:
        file = file if file.exists() else Path(str(given))
        return read_secret(file), file
    if secret := os.environ.get("MOONCAKE_CLUSTER_SECRET"):
        return secret, None
    raise ConfigError(
        f"cluster-secret: Ray on {machine_facts.host_name()} was started without it; start Ray "
        "there with MOONCAKE_CLUSTER_SECRET or MOONCAKE_CLUSTER_SECRET_FILE in its environment"
    )


def _own_address(bind_host: str) -> str:
    """Return where others reach a worker of this machine: `bind_host`, or for a wildcard the
    machine's address as Ray knows it.
    """
    if bind_host not in WILDCARDS:
        return bind_host
    get_node_ip_address: Any = ray.util.get_node_ip_address
    return str(get_node_ip_address())


def connect(address: str | None, *, forks: ForkServer | None = None) -> None:
    """Start Ray for this machine alone, or attach to the cluster at `address`. `forks` starts the
    Python processes of a Ray that is started here.

    Ray's processes end with the *thread* that started them, so it must outlive them.

    Raises:
        ConfigError: there is no cluster at `address`, or this machine is not part of it.
    """
    options: dict[str, Any] = {}
    keep_ray_token_private()
    if address is not None:
        reach(address)  # Ray itself would go on asking for minutes
    else:
        options = {
            "_temp_dir": str(private_dir()),  # its logs and sockets are open to all otherwise
            "num_cpus": 0,
            "num_gpus": machine_facts.num_gpus(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
        }
    python = sys.executable
    if address is None and forks is not None:
        sys.executable = str(forks.executable)  # Ray looks there for what starts Python
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=True,
            **options,
        )
    except Exception as error:  # what Ray raises, such as for a start that takes too long
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"at {address}" if address else "on this machine"
        raise ConfigError(f"no Ray cluster {where}: {first}") from error
    finally:
        sys.executable = python


def disconnect(forks: ForkServer | None = None) -> None:
    """Leave Ray. If `connect` started Ray, it has ended on return with all its processes and with
    what `forks` forked.

    Ray's agents outlive its own shutdown by minutes, so remaining descendants of this process are
    killed.
    """
    if not ray.is_initialized():
        return
    with Descendants() as descendants:
        ray.shutdown()
        if forks is not None:
            forks.close()
        descendants.end(AGENTS_S)


def _daemons() -> list[int]:
    """Return descriptors of the processes of a Ray that this process has started, without which
    nothing goes on in it.
    """
    found = []
    with Descendants() as descendants:
        for pid in descendants.pids:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() in DAEMONS:
                    found.append(os.pidfd_open(pid))
    return found


def leave_dead_ray() -> None:
    """Leave a Ray that this process has started and that has lost a process, and end what is left
    of it but for its agents, which end by themselves or with `disconnect`.
    """
    for descriptor in _daemons():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
    ray.shutdown()


def nodes() -> dict[str, str]:
    """Return the addresses of the machines of this Ray cluster, by their nodes that live. A machine
    whose Ray was started again is another node, and for a while both live.
    """
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in _living()}


def num_gpus() -> float:
    """Return how many GPUs the machines of this Ray cluster have in all."""
    return sum(float(node["Resources"].get("GPU", 0.0)) for node in _living())


def holders(worker_ids: Sequence[str]) -> dict[str, str]:
    """Return the nodes of Ray on whose machines some of these placed workers run already.

    Raises:
        MooncakeError: a machine does not say. It may have one, which must not start twice.
    """
    from mooncake.launch.cluster import placed_worker

    ask: Any = ray.remote(placed_worker.held)
    calls = {}
    for node in _living():
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked = ask.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        calls[asked.remote(list(worker_ids))] = node["NodeID"]
    found: dict[str, str] = {}
    try:
        for call, node_id in calls.items():
            found |= dict.fromkeys(ray.get(call, timeout=HOLDERS_S), node_id)
    except RayError as error:
        raise MooncakeError(f"a machine does not say which workers run there: {error}") from error
    return found


def _living() -> list[dict[str, Any]]:
    known: Any = ray.nodes
    return [node for node in known() if node["Alive"]]


def reach(address: str) -> None:
    """Raise ConfigError when `address` refuses connections, when only one of the two sides speaks
    TLS, or when one does not trust the other.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    files = environment.ray_tls(os.environ)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as plain:
            if files is None:
                speaks = _speaks(plain)
            else:
                with _client_tls(files).wrap_socket(plain, server_hostname=host) as wrapped:
                    speaks = _speaks(wrapped)
    except ssl.SSLError as error:
        raise _distrust(address, error.reason or str(error)) from error
    except OSError as error:
        raise Unreachable(
            f"no Ray cluster at {address}: {error.strerror or error}; is Ray running there, and is "
            "this its address?"
        ) from error
    if not speaks and files is not None:
        raise _distrust(address, "it hung up")
    if not speaks:
        raise ConfigError(
            f"ray-address: Ray at {address} does not answer without TLS: set RAY_USE_TLS=1 and "
            "name certificates of its authority by RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and "
            "RAY_TLS_CA_CERT"
        )


def _distrust(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"ray-address: Ray at {address} and this machine do not trust each other's "
        f"certificates, or Ray speaks in clear there ({why})"
    )


def _client_tls(files: tuple[str, str, str]) -> ssl.SSLContext:
    certfile, keyfile, ca_certs = files
    context = ssl.create_default_context(cafile=ca_certs)
    context.load_cert_chain(certfile, keyfile, password="")
    context.set_alpn_protocols(["h2"])
    return context


def _speaks(connection: socket.socket) -> bool:
    """Return whether the other side sends anything. Ray speaks first, in clear or once TLS is
    agreed on. A server that asks for a client's certificate refuses it here, not in the handshake.
    """
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return False


class Supervisor:
    """Starts worker processes, reports each death at once, restarts workers and ends them all.

    Everything runs in the thread that called `connect`, except `give_up`. `lost` is called with a
    worker's id.
    """

    def __init__(
        self,
        lost: Callable[[str], None],
        drain_s: float = 0.0,
        *,
        waits: bool = False,
        forks: ForkServer | None = None,
        own_ray: bool = False,
        cpus_aside: bool = False,
        run: str = "",
        orphan_s: float = 0.0,
    ) -> None:
        """`drain_s`: how long engines may finish their requests at the end; those that `wait` serve
        until others have taken their place. `forks` starts the processes of this machine.
        `own_ray`: `connect` starts Ray here. `cpus_aside`: engines without GPUs have a CPU of Ray
        for each of their threads. `run`: the name under which a later supervisor finds these
        workers; empty: none does. `orphan_s`: how long they wait for one.
        """
        self._run_name = run or SystemIds().hex(8)
        self._orphan_s = orphan_s if run else 0.0
        self._forks = forks
        self._own_ray = own_ray
        self._cpus_aside = cpus_aside
        self._lost = lost
        self._drain_s = drain_s
        self._waits = waits
        self._secret_file = ""
        self._here_only = True
        self._trouble = ""
        """Why Ray could not start or end workers when that was tried last."""
        self._nodes: Mapping[str, str] | None = None
        """See `place`. None: the workers are of no cluster that a file describes."""
        self._entries: list[_Entry] = []
        self._daemons: list[int] = []
        """Descriptors of the processes of Ray that were started here."""
        self.ray_is_gone = False
        """One of them has ended, and with it all actors. Workers serve on if they are to wait."""
        self._poll = select.poll()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._have_started = False
        """All workers were ready once. From then on a worker that refuses to start does not end the
        others.
        """

    def start(
        self,
        settings: list[WorkerSettings],
        show: Callable[[str, str, int, int], None],
        *,
        here_only: bool,
        secret_file: Path,
    ) -> dict[str, int]:
        """Start the workers and return their pids when all are ready. Workers of this machine read
        the cluster secret in `secret_file`, also after a restart.

        Raises:
            MooncakeError: a worker cannot start, or `give_up` was called.
        """
        self._launch_all(settings, here_only=here_only, secret_file=secret_file, waits=False)
        while not all(entry.state is not None and entry.state.ready for entry in self._entries):
            if self._stopping.is_set():
                raise MooncakeError("stopped while the workers were starting")
            if self.ray_is_gone:
                raise MooncakeError("Ray has ended while the workers were starting")
            self._step()
            for entry in self._entries:
                if entry.early_deaths >= MAX_EARLY_DEATHS:
                    raise MooncakeError(
                        f"{entry.settings.worker_id} died {entry.early_deaths} times while it was "
                        "starting (out of memory?); its log above has more"
                    )
                if entry.state is not None:
                    state = entry.state
                    what = "ready" if state.ready else state.what
                    show(entry.settings.worker_id, what, state.done, state.whole)
        self._have_started = True
        return {e.settings.worker_id: e.state.pid for e in self._entries if e.state is not None}

    def resume(self, settings: list[WorkerSettings], *, here_only: bool, secret_file: Path) -> None:
        """Supervise workers that run already, as `start` does, in a Ray that was started again.
        Those that have ended meanwhile are started; nobody waits for them, nor for their GPUs.
        """
        self._have_started = True
        self._launch_all(settings, here_only=here_only, secret_file=secret_file, waits=True)

    def place(self, settings: list[WorkerSettings], nodes: Mapping[str, str]) -> None:
        """Have Ray place workers of a cluster that a file describes, and supervise them. `nodes`:
        the nodes of Ray on which some of them run already or are to start.
        """
        self._nodes = nodes
        self.resume(settings, here_only=False, secret_file=Path())

    def _launch_all(
        self, settings: list[WorkerSettings], *, here_only: bool, secret_file: Path, waits: bool
    ) -> None:
        self._secret_file, self._here_only = str(secret_file), here_only
        if self._own_ray:
            self._daemons = _daemons()
            for descriptor in self._daemons:
                self._poll.register(descriptor, select.POLLIN)
        for each in settings:
            together = each.expert_group is not None  # these share a memory
            entry = self._launch(each, here_only=here_only or together, waits=waits)
            self._entries.append(entry)

    def give_up(self) -> None:
        """Have `start` or `watch` return soon; from any thread."""
        self._stopping.set()

    def hurry(self) -> None:
        """Have `stop` wait for no worker; from any thread."""
        self._hurry.set()

    def watch(
        self, follower: LoadFollower | None = None, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Watch the workers until `give_up`, until Ray is gone, or until `go_on` returns false. A
        `follower` says which workers start and leave meanwhile.
        """
        while not self._stopping.is_set() and not self.ray_is_gone and go_on():
            self._step()
            if follower is not None and not self._stopping.is_set() and not self.ray_is_gone:
                self._follow(follower)

    def _follow(self, follower: LoadFollower) -> None:
        """Start and end what is to start and to end. What Ray fails to do now is tried again, and
        holds back nothing else.
        """
        own = {entry.settings.worker_id: entry for entry in self._entries}
        held = {name: entry.serves for name, entry in own.items() if not entry.leaves}
        start, leave = follower.changes(held, own.keys() - held.keys())
        changes = [
            *(partial(self._have_start, each) for each in start),
            *(partial(self._have_leave, own[name], follower.drain_s) for name in leave),
        ]
        troubles = dict[str, None]()
        for change in changes:
            try:
                change()
            except (RayError, MooncakeError, RuntimeError, OSError) as error:
                troubles[str(error)] = None
        trouble = "; ".join(troubles)
        if trouble and trouble != self._trouble:
            _log.warning("workers cannot start or leave as wanted; trying again: %s", trouble)
        self._trouble = trouble

    def _have_start(self, settings: WorkerSettings) -> None:
        self._entries.append(self._launch(settings, here_only=self._here_only, waits=True))
        _log.info("%s starts: more are wanted", settings.worker_id)

    def _have_leave(self, entry: _Entry, drain_s: float) -> None:
        if entry.serves:
            entry.actor.stop.remote(drain_s, True)
            entry.leave_by_s = time.monotonic() + drain_s
        else:
            self._drop(entry)
        _log.info("%s leaves: fewer are wanted", entry.settings.worker_id)

    def _drop(self, entry: _Entry) -> None:
        """Forget a worker that was told to leave."""
        self._tell_lost(entry)
        self._end([entry])

    def are_ready(self) -> bool:
        """Return whether all workers serve."""
        return all(entry.serves for entry in self._entries)

    def let_go(self) -> None:
        """End the actors and leave the workers, so that another supervisor adopts them."""
        for entry in self._entries:
            ray.kill(entry.actor, no_restart=True)
            if entry.aside is not None:
                _groups.remove_placement_group(entry.aside)
        self.forget()

    def forget(self) -> list[WorkerSettings]:
        """Let go of the workers of a Ray that is gone, so that another supervisor adopts them.
        Return the settings of those that are to stay.
        """
        held = [entry.settings for entry in self._entries if not entry.leaves]
        for entry in self._entries:
            self._forget_process(entry)
        self._entries = []
        for descriptor in self._daemons:
            os.close(descriptor)
        self._daemons = []
        return held

    def stop(self) -> None:
        """End all workers. Workers that have not begun to serve end at once."""
        self._stopping.set()
        if self.ray_is_gone:
            for entry in self._entries:
                self._kill_process(entry)
            self.forget()
            return
        runs = []
        for entry in self._entries:
            if entry.serves:
                entry.actor.stop.remote(self._drain_s, self._waits)
                runs.append(entry.run)
        end_s = time.monotonic() + self._drain_s + STOP_S
        while runs and time.monotonic() < end_s and not self._hurry.is_set():
            _, runs = ray.wait(runs, num_returns=len(runs), timeout=POLL_S)
        self._end(list(self._entries))
        self.forget()

    def _end(self, entries: Sequence[_Entry]) -> None:
        """End what is left of workers that do not come back: without a supervisor they would wait
        for another one.
        """
        last = [entry.actor.stop.remote(0.0, False) for entry in entries]
        ray.wait(last, num_returns=len(last), timeout=POLL_S) if last else None
        for entry in entries:
            ray.kill(entry.actor, no_restart=True)
            if entry.aside is not None:
                _groups.remove_placement_group(entry.aside)
            self._kill_process(entry)
            self._forget_process(entry)
            self._entries.remove(entry)

    def _launch(self, settings: WorkerSettings, *, here_only: bool, waits: bool = False) -> _Entry:
        """Start a worker as one actor, whose process starts that of each further rank. Ray restarts
        this actor after a death, so no rank comes back without the others. One that `waits` starts
        once there is room for it; meanwhile an autoscaler of Ray adds a node.
        """
        strategy: Any = "SPREAD"
        aside: PlacementGroup | None = None
        where: dict[str, Any] = {}
        node = (self._nodes or {}).get(settings.worker_id)
        if self._nodes is not None:
            where = {"placed": True, "node": node}
        if here_only:
            node = ray.get_runtime_context().get_node_id()
        with contextlib.ExitStack() as undo:  # a try that fails leaves nothing set aside
            if needs := self._needs(settings):
                aside = _set_aside(settings.worker_id, needs, node, 0.0 if waits else PLACE_S)
                undo.callback(_groups.remove_placement_group, aside)
                strategy = PlacementGroupSchedulingStrategy(aside, placement_group_bundle_index=0)
            elif node is not None:
                strategy = NodeAffinitySchedulingStrategy(node, soft=not here_only)
            runtime: dict[str, Any] = {"env_vars": {**environment.QUIET, **environment.COMPUTE}}
            if here_only and self._forks is not None:
                if self._own_ray:  # Ray then has our fork server fork its workers
                    runtime = {}
                else:
                    runtime["py_executable"] = str(self._forks.executable)
            actor: Any = (
                ray.remote(WorkerActor)
                .options(
                    num_cpus=0,
                    num_gpus=settings.num_gpus,  # Ray names them to the process: it sees no others
                    max_restarts=-1,
                    max_task_retries=0,
                    max_concurrency=4,
                    scheduling_strategy=strategy,
                    runtime_env=runtime,
                )
                .remote(settings.worker_id, **where)
            )
            entry = _Entry(settings, actor, self._run(actor, settings), aside=aside)
            undo.pop_all()
            return entry

    def _needs(self, settings: WorkerSettings) -> dict[str, float]:
        """Return what Ray is to set aside for all ranks of a worker."""
        if settings.num_gpus:
            return {"GPU": settings.num_gpus}
        if self._cpus_aside and settings.role in ROLES:
            options = settings.options
            return {"CPU": float((options.num_threads or 1) * options.shape.num_ranks)}
        return {}

    def _run(self, actor: Any, settings: WorkerSettings) -> Any:
        """Make an actor that has just started be a worker; return the call."""
        shares = settings.expert_group is not None  # it cannot meet others that start anew
        orphan_s = 0.0 if shares else self._orphan_s
        return _call_run(actor, settings, self._secret_file, self._run_name, orphan_s)

    def _step(self) -> None:
        """Wait a moment and handle what has happened."""
        wait_s = POLL_S if self._have_started else START_POLL_S
        died = {descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)}
        self.ray_is_gone = self.ray_is_gone or not died.isdisjoint(self._daemons)
        if self._stopping.is_set() or self.ray_is_gone:
            return
        if self._forks is not None and self._forks.ended():
            _log.warning("the fork server has ended: workers that start again take seconds longer")
            self._forks = None
        for entry in self._entries:
            if entry.pidfd in died:
                self._tell_lost(entry)
        runs = {entry.run: entry for entry in self._entries if entry.retry_at_s is None}
        ended, _ = ray.wait(list(runs), num_returns=len(runs), timeout=0) if runs else ([], [])
        for run in ended:
            self._on_end(runs[run])
        now_s = time.monotonic()
        for entry in list(self._entries):
            if entry.leave_by_s is not None and now_s > entry.leave_by_s + STOP_S:
                _log.warning("%s has not left in time: it is ended", entry.settings.worker_id)
                self._drop(entry)
                continue
            if entry.retry_at_s is not None and now_s >= entry.retry_at_s:
                entry.retry_at_s = None
                entry.run = self._run(entry.actor, entry.settings)
                if entry.leave_by_s is not None:  # the actor before may have died untold
                    entry.actor.stop.remote(max(0.0, entry.leave_by_s - now_s), True)
            self._ask_state(entry)

    def _on_end(self, entry: _Entry) -> None:
        """Handle the end of a worker's Ray call: the worker refused to start, or its process
        died.
        """
        worker_id = entry.settings.worker_id
        if entry.leaves:
            self._drop(entry)
            return
        try:
            refusal = ray.get(entry.run)
        except RayError as error:
            _log.debug("%s: %s", worker_id, error)
            away = entry.lost and entry.state is None and isinstance(error, ActorUnavailableError)
            if away or (isinstance(error, RayActorError) and self._may_run(entry)):
                # Ray has yet to start the actor again, which then adopts the worker's process.
                entry.retry_at_s = time.monotonic() + POLL_S
                return
            entry.early_deaths = 0 if entry.state and entry.state.ready else entry.early_deaths + 1
            self._tell_lost(entry)
        else:
            self._tell_lost(entry)
            why = refusal or "it stopped by itself"
            if not self._have_started and (entry.state is None or not entry.state.ready):
                raise MooncakeError(f"{worker_id}: {why}")
            entry.early_deaths += 1
            _log.error("%s cannot start again, and is tried later: %s", worker_id, why)
        entry.state = None
        wait_s = 0.1 * 4 ** min(entry.early_deaths, MOST_STEPS)
        entry.retry_at_s = time.monotonic() + min(LONGEST_WAIT_S, wait_s)

    def _tell_lost(self, entry: _Entry) -> None:
        self._forget_process(entry)
        entry.state_call = None  # the question went to the process that died
        if not entry.lost:
            entry.lost = True
            self._lost(entry.settings.worker_id)

    def _ask_state(self, entry: _Entry) -> None:
        """Keep one open question about the worker's state until it is ready."""
        if entry.retry_at_s is not None or (entry.state and entry.state.ready):
            return
        if entry.state_call is None:
            entry.state_call = entry.actor.state.remote()
        done, _ = ray.wait([entry.state_call], timeout=0)
        if not done:
            return
        call, entry.state_call = entry.state_call, None
        try:
            entry.state = msgspec.msgpack.decode(ray.get(call), type=State)
        except RayError:
            return
        entry.lost = False
        if entry.pidfd is None:
            self._watch_process(entry, entry.state)

    def _may_run(self, entry: _Entry) -> bool:
        """Return whether a worker that was ready may outlive its actor: its process runs here, or
        is on another machine, where gateways notice its end by themselves.
        """
        if entry.state is None or not entry.state.ready or not self._orphan_s:
            return False
        return entry.pidfd is not None or entry.state.boot_id != machine_facts.boot_id()

    def _kill_process(self, entry: _Entry) -> None:
        """End a process of this machine that has not ended, and wait for that."""
        if entry.pidfd is not None:
            if not has_ended(entry.pidfd, POLL_S):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(entry.pidfd, signal.SIGKILL)
            has_ended(entry.pidfd, STOP_S)

    def _watch_process(self, entry: _Entry, state: State) -> None:
        """Have the kernel tell when a process of this machine ends."""
        if state.boot_id != machine_facts.boot_id() or not state.pid:
            return
        try:
            descriptor = os.pidfd_open(state.pid)
        except OSError:  # it is gone already: the Ray call will tell
            return
        entry.pidfd = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def _forget_process(self, entry: _Entry) -> None:
        if entry.pidfd is not None:
            self._poll.unregister(entry.pidfd)
            os.close(entry.pidfd)
            entry.pidfd = None


def _set_aside(
    worker_id: str, needs: Mapping[str, float], node: str | None, wait_s: float
) -> PlacementGroup:
    """Reserve what all ranks of a worker need in one bundle, so that it is on one node: on this
    one, if `node` says which. `wait_s`: how long Ray may take; 0: as long as it wants, and nobody
    waits here.

    Raises:
        MooncakeError: no node has that much free.
    """
    bundle = dict(needs)
    living = _living()
    nodes = [each["Resources"] for each in living]
    if node is not None:
        nodes = [each["Resources"] for each in living if each["NodeID"] == node]
        if not nodes:
            raise MooncakeError(f"{worker_id}: the machine chosen for it has just ended")
        here = nodes[0]
        names = [name for name in here if name.startswith("node:") and "internal" not in name]
        bundle[names[0]] = HERE_SHARE
    group: PlacementGroup = _groups.placement_group([bundle], strategy="STRICT_PACK")
    if not wait_s or group.wait(wait_s):
        return group
    _groups.remove_placement_group(group)
    [(kind, number)] = needs.items()
    there = ", ".join(f"{each.get(kind, 0):g}" for each in nodes)
    resources: Any = ray.available_resources
    free = resources().get(kind, 0.0)
    raise MooncakeError(
        f"{worker_id}: its ranks need {number:g} free {kind}s of one node; "
        f"{'the nodes have' if node is None else 'this machine has'} {there}, and {free:g} are "
        "free in all"
    )


def _call_run(
    actor: Any, settings: WorkerSettings, secret_file: str, run: str, orphan_s: float
) -> Any:
    encoded = msgspec.msgpack.encode(without_secret(settings))
    return actor.run.remote(encoded, secret_file, run, orphan_s)
