"""The simulated twin of a live cluster: the same machines, settings and knowledge, on a model of
this machine that is made from its profile and from rehearsals (other requests of the same kind,
just before and just after, as machines drift), not from what is to be predicted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import msgspec

from benchmarks.support.profiled_cost import ProfiledCost
from benchmarks.support.shared_cores import SharedCores, SharedRunner
from mooncake.base import CostSample, GenerateRequest, Role, WorkerHello, WorkerRef
from mooncake.base.messages import LoadReport
from mooncake.decode.worker import DecodeWorker
from mooncake.engine.plan import StepPlan
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.prefill.worker import PrefillWorker
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.world import RunnerFactory, Stream, WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import EventList, Placed
from mooncake.transfer.engine import Region

START_S = 1.0
CROWDINGS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0)
NUM_TURNS = 2
"""How often paces are looked for: a slower step also makes a longer queue."""
MOST_PACE = 8.0
ENGINES = (Role.PREFILL, Role.DECODE)

Steps = dict[str, list[CostSample]]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request, live or simulated."""

    prefill: str | None
    decode: str
    num_cached_tokens: int
    ttft_s: float
    gaps_s: list[float]


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A request and when it set out, in seconds since the first."""

    at_s: float
    request: GenerateRequest


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were served, and what came of them."""

    played: list[Played]
    outcomes: dict[str, Outcome]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured of a live cluster before the trace begins."""

    profiles: Steps
    """Each worker's self-profile."""
    alone: Steps
    """Steps of requests that were served one at a time."""
    all: Steps
    """All steps before the trace, in order: what the Conductor has heard of."""
    message_s: float
    """One way, from machine to machine, handling included."""
    between_s: float
    """Seconds from the end of a decode step to the beginning of the next one."""
    pool_bytes_per_s: float

    def of_role(self, steps: Steps, role: Role) -> list[CostSample]:
        """Return the steps of all workers of a role."""
        return [one for name, each in steps.items() if name.startswith(role.value) for one in each]


class TwinWorld(World):
    """A world whose workers say the profiles that were measured of each."""

    def __init__(
        self, config: WorldConfig, specs: list[WorkerSpec], make: RunnerFactory, events: EventList,
        profiles: Steps,
    ) -> None:  # fmt: skip
        self._profiles = profiles
        super().__init__(config, specs, make, events)

    def _hello(self, spec: WorkerSpec, ref: WorkerRef, num_blocks: int) -> WorkerHello:
        hello = super()._hello(spec, ref, num_blocks)
        return msgspec.structs.replace(hello, profile=self._profiles[spec.worker_id])


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What the rehearsal showed."""

    crowding: float = 1.0
    """How much engines at work slow each other down, beyond having to share cores."""
    prefill_pace: float = 1.0
    """Seconds of a step under load, for one of a step that ran alone."""
    decode_pace: float = 1.0

    def pace(self, role: Role) -> float:
        """Return that of a role."""
        return self.prefill_pace if role is Role.PREFILL else self.decode_pace


class PacedCost:
    """Implements `sim.runner.StepCost`: another's seconds times `pace`."""

    def __init__(self, cost: ProfiledCost, pace: float) -> None:
        self._cost = cost
        self._pace = pace

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of `plan` in seconds."""
        return self._pace * self._cost.seconds(plan)


class Twin:
    """Simulates the cluster of `settings`."""

    def __init__(
        self,
        plan: ServePlan,
        settings: Sequence[WorkerSettings],
        known: Known,
        rehearsals: Sequence[Rehearsal],
        seed: int,
    ) -> None:
        self._plan = plan
        self._num_cores = machine_facts.num_cores()
        self._settings = settings
        self._known = known
        self._seed = seed
        spec = plan.model.spec
        self._costs = {
            role: ProfiledCost(
                known.of_role(known.profiles, role),
                known.of_role(known.alone, role),
                expert_share=spec.num_experts_per_tok / spec.n_routed_experts,
            )
            for role in ENGINES
        }
        self.tuning = self._tune(rehearsals)

    def _tune(self, rehearsals: Sequence[Rehearsal]) -> Tuning:
        """Return what misses the rehearsals least. For every crowding paces are set so that neither
        first tokens nor gaps come too early or too late on the whole.
        """
        tried = []
        for crowding in CROWDINGS:
            tuning = Tuning(crowding=crowding)
            for _ in range(NUM_TURNS):
                ttft, gap = (
                    statistics.median(ratios) for ratios in self._rehearse(rehearsals, tuning)
                )
                tuning = Tuning(
                    crowding=crowding,
                    prefill_pace=min(ttft * tuning.prefill_pace, MOST_PACE),
                    decode_pace=min(gap * tuning.decode_pace, MOST_PACE),
                )
            miss = sum(
                statistics.median(abs(math.log(ratio)) for ratio in ratios)
                for ratios in self._rehearse(rehearsals, tuning)
            )
            tried.append((miss, tuning))
        return min(tried, key=lambda one: one[0])[1]

    def _rehearse(
        self, rehearsals: Sequence[Rehearsal], tuning: Tuning
    ) -> tuple[list[float], list[float]]:
        """Return live / simulated of each request: its first token, its mean gap."""
        self.tuning = tuning
        ttfts, gaps = [], []
        for one in rehearsals:
            simulated = self.play(one.played, self._known.all)
            for name, live in one.outcomes.items():
                other = simulated[name]
                ttfts.append(live.ttft_s / other.ttft_s)
                gaps.append(statistics.mean(live.gaps_s) / statistics.mean(other.gaps_s))
        return ttfts, gaps

    def play(self, wanted: Sequence[Played], knowledge: Steps) -> dict[str, Outcome]:
        """Return what becomes of the requests; the Conductor has seen the steps in `knowledge`."""
        events = EventList()
        world = self._world(events)
        heap = world.heap
        heap.run_until(START_S)
        for name, steps in knowledge.items():
            self._teach(world, name, steps)
        for one in wanted:
            heap.at(START_S + one.at_s, partial(_submit, world, one.request))
        while len(world.streams) < len(wanted) or not all(
            stream.finals for stream in world.streams.values()
        ):
            heap.run_until(heap.now() + 1.0)
        placed = {e.request_id: e for e in reversed(events.events) if isinstance(e, Placed)}
        return {name: outcome(placed[name], stream) for name, stream in world.streams.items()}

    def _teach(self, world: World, name: str, steps: list[CostSample]) -> None:
        """Let the Conductor know a worker's steps of the warm-up, as it heard of them in life."""
        machine = world.workers[name].machine
        if isinstance(machine, PrefillWorker | DecodeWorker):
            instance = machine.instance
            for first in range(0, len(steps), 16):
                report = LoadReport(
                    worker=instance.worker, load=instance.load(), samples=steps[first : first + 16]
                )
                world.gateway.handle(report, world.heap.now())

    def _world(self, events: EventList) -> World:
        plan, known = self._plan, self._known
        specs = [
            WorkerSpec(worker_id=each.worker_id, role=each.role, node_id=each.node_id)
            for each in self._settings
        ]
        cores: list[SharedCores] = []

        def runner(
            spec: WorkerSpec,
            heap: EventHeap,
            pages: Region,
            deliver: Callable[[msgspec.Struct], None],
        ) -> SharedRunner:
            del pages
            cores[:] = cores or [SharedCores(heap, self._num_cores, self.tuning.crowding)]
            layers = plan.layout.num_layers
            return SharedRunner(
                heap, PacedCost(self._costs[spec.role], self.tuning.pace(spec.role)), deliver,
                cores[0],
                between_s=known.between_s, num_layers=layers, num_layer_reports=layers,
            )  # fmt: skip

        config = WorldConfig(
            layout=plan.layout,
            engine=dict.fromkeys(ENGINES, plan.engine),
            kvstore=plan.kvstore,
            scheduler=plan.scheduler,
            network=NetworkConfig(
                message_delay_s=known.message_s,
                link_bytes_per_s=known.pool_bytes_per_s,
                local_bytes_per_s=known.pool_bytes_per_s,
            ),
            seed=self._seed - 2,
        )
        return TwinWorld(config, specs, runner, events, known.profiles)


def _submit(world: World, request: GenerateRequest) -> None:
    world.submit(request)


def outcome(placed: Placed, stream: Stream) -> Outcome:
    """Return what came of a request in the simulator."""
    times_s = stream.token_times_s
    return Outcome(
        prefill=placed.prefill,
        decode=placed.decode,
        num_cached_tokens=stream.finals[0].num_cached_tokens,
        ttft_s=times_s[0] - stream.submitted_s,
        gaps_s=[after - before for before, after in pairwise(times_s)],
    )
