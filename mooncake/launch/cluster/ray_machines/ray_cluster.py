"""Runs keepers of workers as Ray actors and places them on the machines of a Ray cluster. The only
module that imports ray.

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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from mooncake.base import ConfigError, MooncakeError, Role
from mooncake.launch.cluster.facts import without_secret
from mooncake.launch.cluster.ray_machines.ray_port import reach
from mooncake.launch.cluster.supervision.attendant import Attendant, State
from mooncake.launch.cluster.supervision.supervisor import End, How, Keeper
from mooncake.launch.cluster.supervision.worker_handle import Begin, fingerprint, place_of
from mooncake.launch.config.config import WILDCARDS
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.descendants import Descendants
from mooncake.launch.host.secrets.credentials import keep_ray_token_private, read_secret
from mooncake.launch.host.secrets.secret_file import SECRET_FILE
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.scheduler.scaling.config import ROLES

_groups: Any = importlib.import_module("ray.util.placement_group")
"""Ray declares no types for these."""

NAMESPACE = "mooncake"
HOLDERS_S = 60.0
"""A machine may take this long to start a process that says which workers run there."""
PLACE_S = 10.0
"""Ray may take this long to reserve what a worker needs."""
POLL_S = 0.1
HERE_SHARE = 0.001
"""Share of the resource that stands for one machine: a bundle that asks for it is placed there."""
TELL_S = 0.2
"""Before an actor is ended, Ray gets this long to tell it something."""
DAEMONS = ("gcs_server", "raylet")
"""The names of Ray's processes that nothing replaces."""

_log = logging.getLogger(__name__)


class WorkerActor:
    """Supervises the process of one worker for Ray. `run` blocks in one thread; the other methods
    answer beside it.
    """

    def __init__(self, worker_id: str, *, is_pool: bool, placed: bool = False) -> None:
        """`placed`: the cluster's file on the actor's machine says what the worker is."""
        self._worker_id = worker_id
        self._placed = placed
        self._attendant = Attendant(is_pool=is_pool)

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
        settings = msgspec.msgpack.decode(encoded, type=WorkerSettings)
        try:
            if self._placed:
                from mooncake.launch.cluster.ray_machines import placed_worker

                place, begin = placed_worker.begin(settings.role, settings.worker_id)
            else:
                place = place_of(run, settings.worker_id)
                begin = _begin(settings, Path(secret_file), orphan_s)
            return self._attendant.run(place, begin)
        except MooncakeError as error:
            return error.message

    def state(self) -> bytes:
        return msgspec.msgpack.encode(self._attendant.state())

    def stop(self, drain_s: float, waits: bool) -> None:
        """See `Attendant.stop`."""
        self._attendant.stop(drain_s, waits)


def _begin(settings: WorkerSettings, secret_file: Path, orphan_s: float) -> Begin:
    """Return what a worker's process on this machine is told."""
    secret, file = _secret_here(secret_file)
    return Begin(
        settings=msgspec.structs.replace(settings, host=machine_facts.host_name()),
        secret=secret, secret_file=None if file is None else str(file),
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


def connect(address: str) -> None:
    """Attach to the cluster at `address`.

    Raises:
        ConfigError: there is no cluster at `address`, or this machine is not part of it.
    """
    keep_ray_token_private()
    reach(address)  # Ray itself would go on asking for minutes
    try:
        ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=True
        )
    except Exception as error:  # what Ray raises, such as for a start that takes too long
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"no Ray cluster at {address}: {first}") from error


def disconnect() -> None:
    """Leave Ray."""
    if ray.is_initialized():
        ray.shutdown()


def daemons() -> list[int]:
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


def nodes() -> dict[str, str]:
    """Return the addresses of the machines of this Ray cluster, by their nodes that live. A machine
    whose Ray was started again is another node, and for a while both live.
    """
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in _living()}


def num_gpus() -> float:
    """Return how many GPUs the machines of this Ray cluster have in all."""
    return sum(float(node["Resources"].get("GPU", 0.0)) for node in _living())


class Held(NamedTuple):
    """Where a worker runs that has no keeper."""

    node: str
    """The node of Ray on its machine."""
    gpus: str
    """Those that its process sees, as the variable names them; empty: all that there are."""


def holders(look: Callable[..., dict[str, str]], *words: object) -> dict[str, Held]:
    """Return where workers run already, by their ids. `look` finds those of one machine and their
    GPUs, by `words`.

    Raises:
        MooncakeError: a machine does not say. It may have one, which must not start twice.
    """
    ask: Any = ray.remote(look)
    calls = {}
    found: dict[str, Held] = {}
    try:
        for node in _living():
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked = ask.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            calls[asked.remote(*words)] = node["NodeID"]
        for call, node_id in calls.items():
            here: dict[str, str] = ray.get(call, timeout=HOLDERS_S)
            found |= {name: Held(node_id, gpus) for name, gpus in here.items()}
    except RayError as error:
        raise MooncakeError(f"a machine does not say which workers run there: {error}") from error
    return found


def _living() -> list[dict[str, Any]]:
    known: Any = ray.nodes
    return [node for node in known() if node["Alive"]]


def spread(
    worker_ids: Sequence[str], held: Mapping[str, str], nodes: Sequence[str]
) -> dict[str, str]:
    """Return the node of each worker: those that `held` says where they run stay, and the others
    are shared out evenly.
    """
    placed = {worker_id: held[worker_id] for worker_id in worker_ids if worker_id in held}
    for worker_id in worker_ids:
        if worker_id not in placed:
            numbers = Counter(placed.values())
            placed[worker_id] = min(nodes, key=lambda node: numbers[node])
    return placed


@dataclasses.dataclass(frozen=True)
class RayKeepers:
    """Makes the keepers of one supervisor: an actor for each worker, which Ray places. Ray starts
    an actor again after its death, and its process starts that of each further rank, so no rank
    comes back without the others.
    """

    run: str
    """The name under which a later supervisor finds the workers."""
    secret_file: Path = Path()
    """Workers of this machine read the cluster secret there, also after a restart."""
    orphan_s: float = 0.0
    """See `Begin`."""
    here_only: bool = False
    """Whether all workers run on this machine."""
    cpus_aside: bool = False
    """Whether engines without GPUs have a CPU of Ray for each of their threads."""
    placed: bool = False
    """Whether the workers are those of a cluster that a file describes."""
    nodes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The nodes of Ray on which some of them run already or are to start."""
    groups: dict[str, PlacementGroup] = dataclasses.field(default_factory=dict)
    """What `groups_of_held` has set aside for some, until their keepers take it."""

    def spread_over(
        self, workers: Iterable[WorkerSettings], held: Mapping[str, Held], nodes: Sequence[str]
    ) -> RayKeepers:
        """Return those that keep workers where they run, and share the others out evenly, but for
        those that Ray sets something aside for: it would draw a node for each.
        """
        at = {worker_id: each.node for worker_id, each in held.items()}
        drawn = [each.worker_id for each in workers if not self._needs(each)]
        return dataclasses.replace(self, nodes={**at, **spread(drawn, at, nodes)})

    def __call__(self, settings: WorkerSettings, waits: bool) -> Keeper:
        """Return the keeper of a worker, an actor that Ray starts.

        Raises:
            MooncakeError: Ray has no room for it, or cannot be asked now.
        """
        node = self.nodes.get(settings.worker_id)
        actor, aside = self._start(settings, node, waits=waits)
        begin = partial(self._run, settings=settings)
        again = partial(self._start, settings, waits=True)
        # Where it is placed, who has it placed looks for it when its machine is lost.
        return RayKeeper(actor, aside, begin, node, again, moves=not self.placed)

    def _start(
        self, settings: WorkerSettings, node: str | None, *, waits: bool
    ) -> tuple[Any, PlacementGroup | None]:
        """Start the actor of a worker; `node` says where. Return what is set aside for it, too."""
        here_only = self.here_only or settings.expert_group is not None  # these share a memory
        strategy: Any = "SPREAD"
        aside: PlacementGroup | None = None
        where = {"placed": True} if self.placed else {}
        with _asking(), contextlib.ExitStack() as undo:  # a failed try leaves nothing set aside
            if here_only:
                node = ray.get_runtime_context().get_node_id()
            if needs := self._needs(settings):
                aside = self.groups.pop(settings.worker_id, None) or _set_aside(
                    settings.worker_id, needs, node, 0.0 if waits else PLACE_S
                )
                undo.callback(_groups.remove_placement_group, aside)
                strategy = PlacementGroupSchedulingStrategy(aside, placement_group_bundle_index=0)
            elif node is not None:
                # If it is soft, Ray draws any node for an actor that needs no resources. The worker
                # may run on this one, and would start once more on another.
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            runtime: dict[str, Any] = {"env_vars": {**environment.QUIET, **environment.COMPUTE}}
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
                .remote(settings.worker_id, is_pool=settings.role is Role.KVSTORE, **where)
            )
            undo.pop_all()
            return actor, aside

    def _needs(self, settings: WorkerSettings) -> dict[str, float]:
        """Return what Ray is to set aside for all ranks of a worker."""
        if settings.num_gpus:
            return {"GPU": settings.num_gpus}
        if self.cpus_aside and settings.role in ROLES:
            options = settings.options
            return {"CPU": float((options.num_threads or 1) * options.shape.num_ranks)}
        return {}

    def _run(self, actor: Any, settings: WorkerSettings) -> Any:
        """Make an actor that has just started be a worker; return the call."""
        encoded = msgspec.msgpack.encode(without_secret(settings))
        return actor.run.remote(encoded, str(self.secret_file), self.run, self.orphan_s)


class RayKeeper:
    """An actor that looks after a worker."""

    def __init__(
        self,
        actor: Any,
        aside: PlacementGroup | None,
        run: Callable[[Any], Any],
        node: str | None = None,
        again: Callable[[str | None], tuple[Any, PlacementGroup | None]] | None = None,
        *,
        moves: bool = True,
    ) -> None:
        """`aside`: what is reserved for all its ranks; it stays reserved while it starts again.
        `run` makes it be the worker and returns the call, which lasts as long as that. `node`: the
        node of Ray that it was started at, because its worker runs there or is to. Ray gives up an
        actor whose node it does not know: then `again` returns another one for a node (None: any),
        and what is reserved for that. `moves`: whether that is any node once this one is lost.
        """
        self._actor = actor
        self._aside = aside
        self._begin_run = run
        self._node = node
        self._again = again
        self._moves = moves
        self._is_given_up = False
        self._run: Any = None
        self._state: Any = None
        """The open question about the worker's state."""
        self._stop: Any = None

    def run(self) -> None:
        self._state = None
        with _asking():
            is_lost = self._moves and self._node is not None and self._node not in nodes()
            if self._again is not None and (is_lost or self._is_given_up):
                node = None if is_lost else self._node
                another = self._again(node)
                self.close()
                (self._actor, self._aside), self._node = another, node
                self._is_given_up = False
            self._run = self._begin_run(self._actor)

    def end(self) -> End | None:
        if not _is_done(self._run):
            return None
        try:
            return End(How.STOPPED, ray.get(self._run) or "")
        except ActorUnavailableError as error:
            return End(How.KEEPER_AWAY, str(error))
        except (RayActorError, ActorUnschedulableError) as error:
            self._is_given_up = isinstance(error, ActorUnschedulableError)
            return End(How.KEEPER_DIED, str(error))
        except RayError as error:
            return End(How.DIED, str(error))

    def state(self) -> State | None:
        try:
            if self._state is None:
                self._state = self._actor.state.remote()
            if not _is_done(self._state):
                return None
            call, self._state = self._state, None
            return msgspec.msgpack.decode(ray.get(call), type=State)
        except RayError:
            return None

    def stop(self, drain_s: float, waits: bool) -> None:
        with _asking():
            self._stop = self._actor.stop.remote(drain_s, waits)

    def close(self) -> None:
        try:
            if self._stop is not None:
                ray.wait([self._stop], timeout=TELL_S)
            ray.kill(self._actor, no_restart=True)
            if self._aside is not None:
                _groups.remove_placement_group(self._aside)
        except RayError as error:
            _log.warning("Ray may keep what it has set aside for a worker: %s", error)


def _is_done(call: Any) -> bool:
    """Return whether a call has ended; no, if Ray does not say."""
    try:
        return bool(ray.wait([call], timeout=0)[0])
    except RayError:
        return False


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Raise what Ray raises as a MooncakeError."""
    try:
        yield
    except RayError as error:
        raise MooncakeError(str(error)) from error


def _set_aside(
    worker_id: str, needs: Mapping[str, float], node: str | None, wait_s: float
) -> PlacementGroup:
    """Reserve what all ranks of a worker need in one bundle, so that it is on one node: on this
    one, if `node` says which. `wait_s`: how long Ray may take; 0: as long as it wants, and nobody
    waits here.

    Raises:
        MooncakeError: no node has that much free.
    """
    nodes = [each["Resources"] for each in _living() if node in (None, each["NodeID"])]
    if node is not None and not nodes:
        raise MooncakeError(f"{worker_id}: the machine chosen for it has just ended")
    group = _group(needs, None if node is None else nodes[0])
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


def _group(needs: Mapping[str, float], here: Mapping[str, float] | None = None) -> PlacementGroup:
    """Have Ray reserve this in one bundle, on the node with the resources `here` (None: any)."""
    bundle = dict(needs)
    if here is not None:
        names = [name for name in here if name.startswith("node:") and "internal" not in name]
        bundle[names[0]] = HERE_SHARE
    group: PlacementGroup = _groups.placement_group([bundle], strategy="STRICT_PACK")
    return group


def groups_of_held(
    workers: Iterable[WorkerSettings], held: Mapping[str, Held]
) -> dict[str, PlacementGroup]:
    """Reserve for each worker that runs already the GPUs that it has, which Ray could otherwise
    give to another one. Ray chooses among free GPUs only. So all are taken here, one by one, and
    then those of one worker at a time are free. A worker is left out if another program has one of
    its GPUs.

    Raises:
        MooncakeError: Ray cannot be asked now.
    """
    running = [(each, held[each.worker_id]) for each in workers if each.worker_id in held]
    wanted = [(each, at) for each, at in running if each.num_gpus and at.gpus]
    groups: dict[str, PlacementGroup] = {}
    if not wanted:
        return groups
    with _asking(), contextlib.ExitStack() as undo, contextlib.ExitStack() as failed:
        failed.callback(lambda: give_back(groups.values()))
        here = {each["NodeID"]: each["Resources"] for each in _living()}
        single = _each_gpu({at.node: here[at.node] for _, at in wanted if at.node in here})
        undo.callback(lambda: give_back(single.values()))
        for settings, at in wanted:
            own = [(at.node, gpu) for gpu in at.gpus.split(",")]
            if not all(each in single for each in own):
                continue
            give_back([single.pop(each) for each in own])
            group = _group({"GPU": settings.num_gpus}, here[at.node])
            if group.wait(PLACE_S):
                groups[settings.worker_id] = group
            else:
                give_back([group])
        failed.pop_all()
    return groups


def _each_gpu(
    resources: Mapping[str, Mapping[str, float]],
) -> dict[tuple[str, str], PlacementGroup]:
    """Reserve each free GPU of some nodes by itself; return what is reserved by node and GPU."""
    look: Any = ray.remote(_seen_gpus)
    asked = [
        (node, _group({"GPU": 1.0}, here))
        for node, here in resources.items()
        for _ in range(int(here.get("GPU", 0.0)))
    ]
    end_s = time.monotonic() + PLACE_S
    calls = {}
    with contextlib.ExitStack() as failed:
        failed.callback(lambda: give_back(group for _, group in asked))
        for node, group in asked:
            if not group.wait(max(POLL_S, end_s - time.monotonic())):  # another program has it
                give_back([group])
                continue
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            call = look.options(num_cpus=0, num_gpus=1, max_retries=0, scheduling_strategy=strategy)
            calls[call.remote()] = node, group
        names: list[str] = ray.get([*calls], timeout=HOLDERS_S)
        failed.pop_all()
    return {(node, name): group for name, (node, group) in zip(names, calls.values(), strict=True)}


def _seen_gpus() -> str:
    return environment.variables().get(environment.SEEN_GPUS, "")


def give_back(groups: Iterable[PlacementGroup]) -> None:
    """Let Ray give to others what was reserved."""
    for group in groups:
        _groups.remove_placement_group(group)
