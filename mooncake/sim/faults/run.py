"""A trace on a cluster with faults, which are injected and undone when their duration is over.
Every machine is checked after each of its events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from mooncake.base.machine import Machine
from mooncake.base.messages import Role
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.request import OutputEvent, RequestOutput
from mooncake.sim.faults.checkers import (
    SETTLED_S,
    check_index,
    check_machine,
    check_quiet,
    is_quiet,
)
from mooncake.sim.faults.plan import GATEWAY, Fault, Names, check_faults, random_fault
from mooncake.sim.faults.random_faults import KEPT_EVENTS, SETTLE_S, TrialReport
from mooncake.sim.simulation import START_S, Simulation, SimulationConfig
from mooncake.sim.workload import Arrival, Workload
from mooncake.sim.world.world import World


class Injector:
    """Injects faults into one world. `restarting` is called just before a gateway restarts."""

    def __init__(
        self, world: World, note: Callable[[str], None], restarting: Callable[[], None]
    ) -> None:
        self._world = world
        self._note = note
        self._restarting = restarting
        self._calm = world.network.config
        self.happened: list[Fault] = []
        """The faults so far, in order of time."""

    @property
    def names(self) -> Names:
        """Return the possible targets of faults in this world."""
        specs = [worker.spec for worker in self._world.workers.values()]
        return Names(
            workers=[spec.worker_id for spec in specs],
            nodes=sorted({spec.node_id for spec in specs}),
            pools=[spec.worker_id for spec in specs if spec.role is Role.KVSTORE],
            ranks=[
                f"{spec.worker_id}/{rank}"
                for spec in specs
                if (ranked := self._world.ranked(spec.worker_id)) is not None
                for rank in range(1, ranked.num_ranks)
            ],
            gateways=tuple(self._world.gateway_hosts),
        )

    def schedule(self, faults: Sequence[Fault], start_s: float) -> None:
        """Schedule `faults`; their times count from `start_s` of the world's clock."""
        for fault in faults:
            self._world.heap.at(start_s + fault.at_s, partial(self._happen, fault))

    def _happen(self, fault: Fault) -> None:
        world = self._world
        self._note(str(fault))
        self.happened.append(fault)
        match fault.kind:
            case "kill":
                world.kill(fault.target)
            case "kill_node":
                for worker in world.workers.values():
                    if worker.spec.node_id == fault.target:
                        world.kill(worker.spec.worker_id, noticed=False)
            case "hang":
                world.hang(fault.target, fault.seconds)
            case "hang_step":
                world.hang_step(fault.target)
            case "cut" | "cut_gateway":
                self._cut(
                    world.network.partition, fault.target, fault.other or GATEWAY, fault.seconds
                )
            case "cut_one_way":
                cut = world.network.partition_one_way
                self._cut(cut, fault.target, fault.other, fault.seconds)
            case "kill_rank" | "hang_rank" | "slow_rank" | "lose_step":
                self._rank(fault)
            case "slow_disk" | "disk_error":
                self._disks(fault)
            case "skew":
                self._skew(fault.target, fault.amount)
            case "change_role":
                world.change_role(fault.target)
            case "leave":
                world.leave(fault.target, fault.seconds)
            case "restart_gateway":
                self._restarting()
                world.start_gateway()
            case _:
                self._disturb(fault)

    def _cut(self, partition: Callable[..., None], target: str, other: str, seconds: float) -> None:
        partition(target, other, cut=True)
        self._world.heap.after(seconds, lambda: partition(target, other, cut=False))

    def _rank(self, fault: Fault) -> None:
        worker_id, _, number = fault.target.rpartition("/")
        ranked, rank = self._world.ranked(worker_id), int(number)
        if ranked is None:
            return  # its worker is dead
        match fault.kind:
            case "kill_rank":
                ranked.kill_rank(rank)
            case "hang_rank":
                ranked.hang_rank(rank, fault.seconds)
            case "slow_rank":
                ranked.slow_rank(rank, fault.amount, fault.seconds)
            case _:
                ranked.lose_step(rank)

    def _disks(self, fault: Fault) -> None:
        """Trouble the node's disks, and the bucket. This outlives the process that uses them."""
        media = [*self._world.workers[fault.target].media, self._world.bucket]
        refuses = fault.kind == "disk_error"
        for medium in media:
            medium.slowdown = fault.amount or 1.0
            medium.refuses_reads = medium.refuses_writes = refuses

        def mend() -> None:
            for medium in media:
                medium.slowdown = 1.0
                medium.refuses_reads = medium.refuses_writes = False

        self._world.heap.after(fault.seconds, mend)

    def _skew(self, target: str, seconds: float) -> None:
        world = self._world
        if target == GATEWAY:
            process = world.gateway_hosts[GATEWAY].process
        else:
            worker = world.workers[target]
            if worker.process is None or worker.address is None:
                return  # a dead process has no clock
            process = worker.process
            endpoint = world.network.find(worker.address)
            if endpoint is not None:
                endpoint.skew_s += seconds
        process.skew_s += seconds
        process.wake(process.now())

    def _disturb(self, fault: Fault) -> None:
        """Worsen the network for the duration of `fault`."""
        changes: dict[str, float] = {
            "lose": {"loss": fault.amount},
            "delay": {"message_delay_s": fault.amount, "message_jitter_s": fault.amount},
            "reorder": {"reordered": fault.amount, "message_jitter_s": 0.05},
            "slow_links": {"link_bytes_per_s": 1e3},
        }[fault.kind]
        network = self._world.network
        network.config = msgspec.structs.replace(network.config, **changes)
        self._world.heap.after(fault.seconds, self._calm_down)

    def _calm_down(self) -> None:
        self._world.network.config = self._calm


NUM_RANDOM = 20
"""The number of faults that are drawn when none are given."""


class FaultyRun:
    """One simulation under faults, measured as any other simulation."""

    def __init__(
        self,
        config: SimulationConfig,
        workload: Workload,
        faults: Sequence[Fault] | None,
        source: str,
    ) -> None:
        """Prepare the run. With `faults` None, faults are drawn from the configuration's seed.

        Raises:
            ConfigError: a fault cannot happen in this cluster; the message names its `source`.
        """
        self.simulation = Simulation(
            config, workload, self._after_event, self._check_tokens, with_ranks=True
        )
        self._world = self.simulation.world
        self._world.network.listener = self._hear
        self._trace: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._num_tokens: Counter[int] = Counter()
        self._injector = Injector(self._world, self._trace.append, self._forget)
        names = self._injector.names
        if faults is None:
            random = self._world.random
            faults = [
                random_fault(random, names, random.random() * workload.duration_s)
                for _ in range(NUM_RANDOM)
            ]
        else:
            check_faults(faults, names, source)
        self._injector.schedule(faults, START_S)
        self._last_s = START_S + max((fault.at_s + fault.seconds for fault in faults), default=0.0)

    def run(self, progress: Callable[[int, int], None] | None = None) -> TrialReport:
        """Run to the end; a failed check is reported, not raised."""
        failure: str | None = None
        try:
            self.simulation.run(progress)
            self._settle()
        except AssertionError as error:
            failure = str(error) or "an assertion without a message"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        requests = self.simulation.measures.requests
        happened = self._injector.happened
        return TrialReport(
            seed=self.simulation.config.seed,
            num_events=self._world.heap.num_run,
            num_requests=len(requests),
            faults=dict(sorted(Counter(fault.kind for fault in happened).items())),
            injected=[str(fault) for fault in happened],
            endings=dict(sorted(Counter(_ending(r.final, r.abandoned) for r in requests).items())),
            failure=failure,
            last_events=list(self._trace) if failure else [],
        )

    def _settle(self) -> None:
        """Run until the cluster is quiet, then check that nothing is left."""
        heap = self._world.heap
        heap.run_until(max(heap.now(), self._last_s))
        end_s = heap.now() + SETTLE_S
        while heap.now() < end_s and not is_quiet(self._world):
            heap.run_until(heap.now() + 5.0)
        heap.run_until(heap.now() + SETTLED_S)
        for request in self.simulation.measures.requests:
            name = request.arrival.request_id
            if not request.abandoned:
                assert request.num_finals == 1, f"{name}: {request.num_finals} final events"
            if request.completed:
                wanted = request.arrival.num_output_tokens
                assert request.num_tokens == wanted, f"{name}: {request.num_tokens} of {wanted}"
        check_quiet(self._world)
        check_index(self._world)

    def _after_event(self, machine: Machine) -> None:
        check_machine(machine)

    def _check_tokens(self, arrival: Arrival, event: OutputEvent) -> None:
        """Check that resumed requests continue with the tokens of a run without faults."""
        if not isinstance(event, RequestOutput):
            return
        first = self._num_tokens[arrival.index]
        self._num_tokens[arrival.index] += len(event.tokens)
        for position, token in enumerate(event.tokens, first):
            expected = self.simulation.token(arrival.index, position)
            assert token == expected, (
                f"{arrival.request_id}: token {position} is {token}, not {expected}"
            )

    def _forget(self) -> None:
        self.simulation.measures.abandon()

    def _hear(self, source: str, target: str, message: AnyMessage) -> None:
        name = type(message).__name__
        if name not in ("LoadReport", "BlockEvents"):
            request = getattr(message, "request_id", "") or getattr(message, "ticket", "")
            now = self._world.heap.now()
            self._trace.append(f"{now:9.4f}  {source} -> {target}  {name} {request}")


def _ending(final: object, abandoned: bool) -> str:
    if abandoned:
        return "forgotten by a restarted gateway"
    return str(getattr(final, "value", "none"))
