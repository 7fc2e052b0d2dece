"""A trace on a cluster with faults; every machine is checked after each of its events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from mooncake.base.machine import Machine
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.request import OutputEvent, RequestOutput
from mooncake.sim.faults.checkers import (
    SETTLED_S,
    check_index,
    check_machine,
    check_quiet,
    is_quiet,
)
from mooncake.sim.faults.injector import Injector
from mooncake.sim.faults.plan import Fault, check_faults, random_fault
from mooncake.sim.faults.random_faults import KEPT_EVENTS, SETTLE_S, TrialReport
from mooncake.sim.simulation import START_S, Simulation, SimulationConfig
from mooncake.sim.workload import Arrival, Workload

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
        """Prepare the run. Faults are drawn from the configuration's seed if `faults` is None.

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
