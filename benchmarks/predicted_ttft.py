"""How far the gateway's prediction of a first token is from what comes, without a model: `python -m
benchmarks predicted-ttft`. The shipped machines run in simulated time; steps take as long as those
of k2-small on two cores of an EPYC (Zen 4), and scatter.

The load is mixed: short chats, long prompts, and prompts that begin with one of three prefixes. The
error is |predicted / actual - 1| of each request, from its placement on. A gateway cannot know how
long the steps scatter, how long answers become, and which requests are still to come.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from benchmarks.planned_steps import PREFILL_PACE, WITH, WITHOUT, draw, step_s
from mooncake.base import (
    CostSample,
    GenerateRequest,
    KvLayout,
    OutputEvent,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.base.request import FinalEvent
from mooncake.engine.plan import StepPlan
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.worker.profile import DECODE_SHAPES, PREFILL_SHAPES, Shape
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.runner import SimRunner
from mooncake.sim.world.world import WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import EventList, FirstToken, Placed
from mooncake.transfer.engine import Region

LAYOUT = KvLayout(
    num_layers=2, block_tokens=WITH.block_tokens, kv_width=8, dtype="float8_e4m3fn",
    fingerprint="predicted",
)  # fmt: skip
POOL_BLOCKS = 4000
NETWORK = NetworkConfig(message_delay_s=0.001, link_bytes_per_s=1e9, local_bytes_per_s=1e9)
START_S = 1.0
LAYOUTS = {
    "colocated": {Role.DECODE: 1},
    "1P+1D+pool": {Role.PREFILL: 1, Role.DECODE: 1, Role.KVSTORE: 1},
}
SHARED_TOKENS, NUM_SHARED = 512, 3
CHAT, LONG = 0.6, 0.2
"""The shares of chats and of long prompts; the others share a prefix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """A request of the load."""

    at_s: float
    prompt: list[int]
    output_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """What was predicted of a request, and what came of it, in seconds since it was placed."""

    predicted_s: float
    actual_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.actual_s - 1)


class _ScatteredCost:
    """Implements `sim.runner.StepCost`."""

    def __init__(self, pace: float, scatter: float, seed: int) -> None:
        self._pace = pace
        self._scatter = scatter
        self._random = random.Random(seed)

    def seconds(self, plan: StepPlan) -> float:
        slots = [(len(slot.tokens), slot.start) for slot in plan.slots]
        return step_s(slots, self._pace) * self._random.lognormvariate(0, self._scatter)

    def profiled(self, shape: Shape) -> CostSample:
        """Return a step of a self-profile."""
        sequences, new, before = shape
        seconds = step_s([(new, before)] * sequences, self._pace)
        sample = CostSample(sequences * new, sequences * before, sequences, seconds)
        return sample.of_streams() if new == 1 else sample


def mixed_load(rate: float, count: int, seed: int) -> list[Sent]:
    """Return so many requests, which come at random, `rate` a second."""
    source = random.Random(seed)
    prefixes = [draw(source, SHARED_TOKENS) for _ in range(NUM_SHARED)]
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += source.expovariate(rate)
        kind = source.random()
        if kind < CHAT:
            prompt, most = draw(source, source.randint(32, 256)), 96
        elif kind < CHAT + LONG:
            prompt, most = draw(source, source.randint(768, 3072)), 64
        else:
            prompt, most = source.choice(prefixes) + draw(source, source.randint(64, 256)), 128
        found.append(Sent(at_s=at_s, prompt=prompt, output_len=source.randint(16, most)))
    return found


def compare(
    layout: str, load: Sequence[Sent], *, with_targets: bool, scatter: float, seed: int
) -> list[Compared]:
    """Play the load, and return what was predicted and what came."""
    events = EventList()
    world = _world(layout, events, with_targets=with_targets, scatter=scatter, seed=seed)
    world.heap.run_until(START_S)
    ended: list[str] = []

    def send(name: str, sent: Sent) -> None:
        def receive(event: OutputEvent) -> None:
            if isinstance(event, FinalEvent):
                ended.append(name)

        sampling = SamplingParams(max_tokens=sent.output_len, temperature=0.0, ignore_eos=True)
        prompt = pack_tokens(sent.prompt)
        world.send(GenerateRequest(request_id=name, prompt=prompt, sampling=sampling), receive)

    for number, sent in enumerate(load):
        name = str(number)
        world.heap.at(START_S + sent.at_s, partial(send, name, sent))
    while len(ended) < len(load):
        world.heap.run_until(world.heap.now() + 1.0)
    placed = {each.request_id: each for each in events.events if isinstance(each, Placed)}
    return [
        Compared(
            predicted_s=placed[each.request_id].predicted_ttft_s,
            actual_s=each.at_s - placed[each.request_id].at_s,
        )
        for each in events.events
        if isinstance(each, FirstToken)
    ]


def _world(
    layout: str, events: EventList, *, with_targets: bool, scatter: float, seed: int
) -> World:
    counts = LAYOUTS[layout]
    paces = {Role.PREFILL: PREFILL_PACE, Role.DECODE: 1.0}
    costs = {role: _ScatteredCost(pace, scatter, seed) for role, pace in paces.items()}
    engine = WITH if with_targets else WITHOUT

    def runner(
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> SimRunner:
        del pages
        return SimRunner(heap, costs[spec.role], deliver, num_layers=LAYOUT.num_layers)

    config = WorldConfig(
        layout=LAYOUT,
        engine={Role.PREFILL: engine, Role.DECODE: engine},
        kvstore=KvStoreConfig(dram_bytes=POOL_BLOCKS * LAYOUT.block_bytes),
        network=NETWORK,
        profile={
            Role.PREFILL: list(map(costs[Role.PREFILL].profiled, PREFILL_SHAPES)),
            Role.DECODE: list(map(costs[Role.DECODE].profiled, DECODE_SHAPES)),
        },
    )
    specs = [
        WorkerSpec(worker_id=f"{role.value}-{number}", role=role, node_id="host")
        for role, count in counts.items()
        for number in range(count)
    ]
    return World(config, specs, runner, events)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks predicted-ttft", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.35, 0.5])
    parser.add_argument("--scatters", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=150, help="of each seed (150)")
    args = parser.parse_args(argv)
    titles = [f"{layout}, {kind}" for layout in LAYOUTS for kind in ("without", "with targets")]
    print(f"| scatter | requests/s | {' | '.join(titles)} |")
    print(f"|---|---|{'---|' * len(titles)}")
    for scatter, rate in itertools.product(args.scatters, args.rates):
        cells = []
        for layout, with_targets in itertools.product(LAYOUTS, (False, True)):
            found = [
                each
                for seed in range(1, args.seeds + 1)
                for each in compare(
                    layout, mixed_load(rate, args.requests, seed),
                    with_targets=with_targets, scatter=scatter, seed=seed,
                )
            ]  # fmt: skip
            error = statistics.median(each.error for each in found)
            first_s = statistics.median(each.actual_s for each in found)
            cells.append(f"{error:.1%} of {first_s:.2f} s")
        print(f"| {scatter:.0%} | {rate:g} | {' | '.join(cells)} |", flush=True)
    return 0
