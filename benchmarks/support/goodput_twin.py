"""The simulated twin of a goodput trial: the shipped machines under the same load, on a model of
this machine that is made of `mooncake profile`'s steps and the trial's idle requests. It knows
nothing of the trial's other requests.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.support.goodput_figures import Limits, Outcome, Trial
from benchmarks.support.servers import Layout
from benchmarks.support.sessions import PARTIES, Session
from benchmarks.support.shared_cores import SharedCores, SharedRunner
from mooncake.base import ConfigError, CostSample, GenerateRequest, SamplingParams, pack_tokens
from mooncake.base.messages import Role
from mooncake.base.request import FinalEvent, FinishReason, OutputEvent, Priority
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import StepPlan
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.profile import DECODE_SHAPES, PREFILL_SHAPES, Shape
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.world import WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import EventList
from mooncake.telemetry.stats import slow_gap_mean
from mooncake.transfer.engine import Region

START_S = 1.0
NOISE = 0.1
"""The spread (of logarithms) of equal steps on a quiet machine."""
BUSY = 1.25
"""How much longer prompts take on a busy server than on an idle one, where all that its other
processes do waits. Fitted to trials of two cores, of which the twin knew nothing else.
"""
NETWORK = NetworkConfig(message_delay_s=0.001, link_bytes_per_s=1e9, local_bytes_per_s=1e9)
"""All workers are on one machine: a message takes about a millisecond there."""
NUM_TURNS = 2
"""How often paces are looked for: a slower step also makes a longer queue."""
ENGINES = {Role.PREFILL: PREFILL_SHAPES, Role.DECODE: DECODE_SHAPES}
WELL = (FinishReason.STOP, FinishReason.LENGTH)


class MachineCost:
    """Implements `sim.runner.StepCost`: seconds by a fit to measured steps, which chunks and
    streams may take longer by a factor of each, and which scatter.
    """

    def __init__(self, samples: Sequence[CostSample], seed: int) -> None:
        self._model = StepCostModel(samples)
        self._random = random.Random(seed)
        self.prompt_pace = self.stream_pace = 1.0

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of `plan` in seconds."""
        slots = [(len(slot.tokens), slot.start) for slot in plan.slots]
        return self.usual_s(slots) * self._random.lognormvariate(0, NOISE)

    def usual_s(self, slots: Sequence[tuple[int, int]]) -> float:
        """Return the seconds without scatter of a step of (new tokens, tokens before) each."""
        model = self._model
        streams = [before for new, before in slots if new == 1]
        chunks = [(new, before) for new, before in slots if new > 1]
        streams_s = model.streams_s(len(streams), sum(streams)) if streams else 0.0
        if not chunks:
            return self.stream_pace * streams_s
        fixed_s = model.coefficients[0]
        chunks_s = sum(model.step_s(new, before, 1) - fixed_s for new, before in chunks)
        chunks_s += fixed_s - (model.stream_coefficients[0] if streams else 0.0)
        return self.stream_pace * streams_s + self.prompt_pace * max(0.0, chunks_s)

    def sample(self, shape: Shape) -> CostSample:
        """Return a step of a self-profile as this machine would time it."""
        sequences, new, before = shape
        seconds = self.usual_s([(new, before)] * sequences)
        sample = CostSample(sequences * new, sequences * before, sequences, seconds)
        return sample.of_streams() if new == 1 else sample


def read_profile(path: Path) -> list[CostSample]:
    """Return the steps in a file that `mooncake profile --out` wrote.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        document = json.loads(path.read_bytes())
        return [
            CostSample(**sample) for role in ENGINES for sample in document[role.value]["samples"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"twin: {path} has no profile ({error}); write one with `mooncake profile MODEL --out "
            f"{path}`"
        ) from error


def plan_of(layout: Layout) -> ServePlan:
    """Return the plan of one of our servers on this machine.

    Raises:
        ValueError: the layout is not `servers.ours`.
    """
    if not layout.is_ours:
        raise ValueError(f"{layout.name} is not one of our servers")
    words = layout.command[layout.command.index("serve") + 1 :]
    given: dict[str, object] = {"model": words[0]}
    for place, word in enumerate(words):
        if word.startswith("--"):
            follows = words[place + 1] if place + 1 < len(words) else "--"
            given[word[2:].replace("-", "_")] = True if follows.startswith("--") else follows
    return make_plan(resolve(given, None, {}), machine_facts.num_cores())


def twin(
    plan: ServePlan,
    samples: Sequence[CostSample],
    trial: Trial,
    alone: Sequence[Session],
    sessions: Sequence[Session],
    limits: Limits,
    patience: float,
    scatter: int = 0,
) -> list[Outcome]:
    """Return what becomes of the load in the simulator, on a machine on which the requests of
    `alone` take as long as those that the trial sent to the idle server; where it sent none, as
    long as the samples say. patience: a client goes away after so many times what the limits allow
    in all. scatter: with another number equal steps take other times.
    """
    cost = MachineCost(samples, trial.seed + scatter)
    for _ in range(NUM_TURNS if trial.idle_ttft_s > 0 else 0):
        lone = _played(plan, cost, alone, limits, patience)
        ttft_s = statistics.median(one.ttft_s for one in lone)
        tbt_s = statistics.median(one.tbt_s for one in lone)
        if ttft_s > 0:
            cost.prompt_pace *= trial.idle_ttft_s / ttft_s
        if tbt_s > 0:
            cost.stream_pace *= trial.idle_tbt_s / tbt_s
    cost.prompt_pace *= BUSY
    return _played(plan, cost, sessions, limits, patience)


def _played(
    plan: ServePlan,
    cost: MachineCost,
    sessions: Sequence[Session],
    limits: Limits,
    patience: float,
) -> list[Outcome]:
    world = _world(plan, cost)
    world.heap.run_until(START_S)
    followed = [
        _Client(world, number, one, limits, patience) for number, one in enumerate(sessions)
    ]
    for client in followed:
        world.heap.at(START_S + client.session.at_s, client.send)
    while not all(client.is_done for client in followed):
        world.heap.run_until(world.heap.now() + 1.0)
    return [outcome for client in followed for outcome in client.outcomes]


class _Client:
    """Plays one session, as `goodput.play` does."""

    def __init__(
        self, world: World, number: int, session: Session, limits: Limits, patience: float
    ) -> None:
        self.session = session
        self.outcomes: list[Outcome] = []
        self._world = world
        self._name = f"s{number}"
        self._limits = limits
        self._patience = patience
        self._said: list[int] = []
        party = PARTIES.get(session.party)
        self._tenant = party.tenant if party else ""
        self._priority = Priority(party.priority) if party else Priority.INTERACTIVE

    @property
    def is_done(self) -> bool:
        return len(self.outcomes) == len(self.session.turns)

    def send(self) -> None:
        """Send the next turn."""
        turn = self.session.turns[len(self.outcomes)]
        self._said = [*self._said, *turn.fresh]
        request = GenerateRequest(
            request_id=f"{self._name}-{len(self.outcomes)}",
            prompt=pack_tokens(self._said),
            sampling=SamplingParams(max_tokens=turn.output_len, temperature=0.0, ignore_eos=True),
            tenant=self._tenant,
            priority=self._priority,
        )
        heap, sent_s = self._world.heap, self._world.heap.now()
        times_s: list[float] = []
        ended: list[FinalEvent] = []

        def receive(event: OutputEvent) -> None:
            if isinstance(event, FinalEvent):
                ended.append(event)
                self._end(event.reason, sent_s, times_s)
            else:
                times_s.extend([heap.now()] * len(event.tokens))
                self._said += event.tokens

        def give_up() -> None:
            if not ended:
                self._world.abort(request.request_id)

        allowed_s = self._limits.ttft_s + turn.output_len * self._limits.tbt_s
        heap.after(self._patience * allowed_s, give_up)
        self._world.send(request, receive)

    def _end(self, reason: FinishReason, sent_s: float, times_s: list[float]) -> None:
        if reason in WELL:
            gaps_s = [after - before for before, after in pairwise(times_s)]
            self.outcomes.append(
                Outcome(
                    end="whole", ttft_s=times_s[0] - sent_s, tbt_s=slow_gap_mean(gaps_s),
                    party=self.session.party,
                )
            )  # fmt: skip
            if not self.is_done:
                self._world.heap.after(self.session.turns[len(self.outcomes)].pause_s, self.send)
            return
        ends = {FinishReason.REJECTED: "refused", FinishReason.ABORT: "late"}
        lost = {"end": ends.get(reason, "failed"), "party": self.session.party}
        self.outcomes.append(msgspec.convert(lost, Outcome))
        left = len(self.session.turns) - len(self.outcomes)
        self.outcomes += [Outcome(end="late", party=self.session.party)] * left


def _world(plan: ServePlan, cost: MachineCost) -> World:
    roles = {
        Role.PREFILL: plan.num_prefills,
        Role.DECODE: plan.num_decodes,
        Role.KVSTORE: plan.num_kvstores,
    }
    specs = [
        WorkerSpec(worker_id=f"{role.value}-{index}", role=role, node_id="host")
        for role, count in roles.items()
        for index in range(count)
    ]
    cores: list[SharedCores] = []

    def runner(
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> SharedRunner:
        del spec, pages
        # The engines' own threads are not simulated: as many engines as share them run at once.
        cores[:] = cores or [SharedCores(heap, plan.num_engines)]
        num_layers = plan.layout.num_layers
        return SharedRunner(
            heap, cost, deliver, cores[0], num_layers=num_layers, num_layer_reports=num_layers
        )

    config = WorldConfig(
        layout=plan.layout,
        engine={role: plan.engine_of(role) for role in ENGINES},
        kvstore=plan.kvstore,
        scheduler=plan.scheduler,
        network=NETWORK,
        profile={role: list(map(cost.sample, shapes)) for role, shapes in ENGINES.items()},
    )
    return World(config, specs, runner, EventList())


Twins = tuple[Trial, Sequence[Outcome], Sequence[Outcome]]
"""A measured trial, and two simulations of it whose steps scatter differently."""


def compared(twins: Sequence[Twins], limits: Limits) -> list[str]:
    """Return a table in Markdown: what was measured in each trial, and what its twin foretold; and
    how much single requests differ, measured from simulated and simulated from simulated.
    """
    lines = [
        "| load | requests/s | seed | server | good: measured, simulated | refused "
        "| median TTFT s | median TBT ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = []
    for trial, outcomes, _ in twins:
        other = msgspec.structs.replace(trial, outcomes=list(outcomes))
        others.append((trial, other))
        figures = zip(_figures(trial, limits), _figures(other, limits), strict=True)
        cells = " | ".join(f"{measured}, {simulated}" for measured, simulated in figures)
        lines.append(f"| {trial.load} | {trial.rate:g} | {trial.seed} | {trial.server} | {cells} |")
    if others:
        mean = statistics.mean(abs(one.share(limits) - two.share(limits)) for one, two in others)
        lines += [
            "",
            f"Mean difference of the share of good requests: {mean:.0%}.",
            "Trials' medians are foretold wrongly by (median and mean of trials): TTFT "
            f"{_of_medians(others, 'ttft_s')}, TBT {_of_medians(others, 'tbt_s')}.",
        ]
        life = [(trial.outcomes, outcomes) for trial, outcomes, _ in twins]
        scatter = [(outcomes, again) for _, outcomes, again in twins]
        lines += [
            f"Median difference of single requests: {_differences(life)}; of two simulations whose "
            f"steps scatter differently: {_differences(scatter)}."
        ]
    return lines


def _of_medians(others: Sequence[tuple[Trial, Trial]], field: Literal["ttft_s", "tbt_s"]) -> str:
    """Return how wrongly the medians of trials are foretold; others: (measured, foretold)."""
    pairs = [(one.median(field), other.median(field)) for one, other in others]
    errors = [abs(foretold / measured - 1) for measured, foretold in pairs if measured and foretold]
    if not errors:
        return "-"
    return f"{statistics.median(errors):.0%} and {statistics.mean(errors):.0%}"


def _differences(pairs: Sequence[tuple[Sequence[Outcome], Sequence[Outcome]]]) -> str:
    """Return the median relative difference of first tokens and of gaps, of requests that ended
    whole in both.
    """
    both = [
        (one, other)
        for left, right in pairs
        for one, other in zip(left, right, strict=True)
        if one.end == other.end == "whole"
    ]
    ttfts = [abs(other.ttft_s / one.ttft_s - 1) for one, other in both if one.ttft_s]
    tbts = [abs(other.tbt_s / one.tbt_s - 1) for one, other in both if one.tbt_s]
    return " and ".join(
        f"{name} {statistics.median(values):.0%}" if values else f"{name} -"
        for name, values in (("TTFT", ttfts), ("TBT", tbts))
    )


def _figures(trial: Trial, limits: Limits) -> list[str]:
    return [
        f"{trial.share(limits):.0%}",
        f"{trial.num('refused') / len(trial.outcomes):.0%}",
        f"{trial.median('ttft_s') or 0.0:.2f}",
        f"{1e3 * (trial.median('tbt_s') or 0.0):.0f}",
    ]
