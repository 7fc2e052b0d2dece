"""A load whose balance flips: workers change between prefill and decode, more requests keep their
limits than without, and none is lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import msgspec
import pytest

from mooncake.base import (
    CostSample,
    FinishReason,
    GenerateRequest,
    KvLayout,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.base.machine import Machine
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepPlan
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.config.shipped import figures
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.faults.checkers import (
    check_ended,
    check_index,
    check_machine,
    check_quiet,
    check_stream,
)
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine, Workload
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.runner import SimRunner
from mooncake.sim.world.world import Stream, SupervisorConfig, WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import Recorders
from mooncake.transfer.engine import Region

FIXED_S, TOKEN_S = 0.02, 5e-3
TTFT_S, TBT_S = 2.0, 0.04
PHASE_S = 60.0
TTFT_LIMIT_S, GAP_S = 10.0, 0.03
"""Of the larger cluster."""
LAYOUT = KvLayout(
    num_layers=2, block_tokens=16, kv_width=8, dtype="float8_e4m3fn", fingerprint="flip"
)
WELL = (FinishReason.STOP, FinishReason.LENGTH)


class StepCost:
    """A step takes 20 ms and five more for each token."""

    def seconds(self, plan: StepPlan) -> float:
        return FIXED_S + TOKEN_S * plan.num_tokens


class Checks:
    """Looks after one event of twenty: here are many."""

    def __init__(self) -> None:
        self._num_events = 0

    def __call__(self, machine: Machine) -> None:
        self._num_events += 1
        if self._num_events % 20 == 0:
            check_machine(machine)


def cluster(
    seed: int = 0,
    network: NetworkConfig | None = None,
    *,
    with_pools: bool = True,
    **scheduler: object,
) -> World:
    """Return two prefill and two decode workers with limits to keep."""

    def make_runner(
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> SimRunner:
        del spec, pages
        return SimRunner(heap, StepCost(), deliver, num_layers=2, num_layer_reports=2)

    engine = EngineConfig(
        num_blocks=2000, max_num_seqs=64, max_batched_tokens=128, max_chunk_tokens=128,
        max_model_len=2048, max_waiting=1024, block_tokens=LAYOUT.block_tokens,
    )  # fmt: skip
    steps = [
        CostSample(tokens, 0, sequences, FIXED_S + TOKEN_S * tokens)
        for tokens, sequences in ((1, 1), (4, 4), (8, 8), (32, 1), (128, 1))
    ]
    settings = {"ttft_slo_s": TTFT_S, "tbt_slo_s": TBT_S, "role_switch_after_s": 3.0, **scheduler}
    workers = [
        WorkerSpec(worker_id=f"{role.value}-{index}", role=role, node_id=f"{role.value}{index}")
        for role in (Role.PREFILL, Role.DECODE)
        for index in range(2)
    ]
    pools = [
        WorkerSpec(worker_id=f"pool-{spec.worker_id}", role=Role.KVSTORE, node_id=spec.node_id)
        for spec in workers
    ]
    return World(
        WorldConfig(
            layout=LAYOUT,
            engine={Role.PREFILL: engine, Role.DECODE: engine},
            kvstore=KvStoreConfig(dram_bytes=4000 * LAYOUT.block_bytes),
            instance=InstanceConfig(quarantine_s=5.0),
            scheduler=SchedulerConfig(role_switch_drain_s=4.0, **settings),  # type: ignore[arg-type]
            profile={Role.PREFILL: steps, Role.DECODE: steps},
            network=network or NetworkConfig(),
            supervisor=SupervisorConfig(change_s=1.0),
            seed=seed,
        ),
        [*workers, *(pools if with_pools else ())],
        make_runner,
        Recorders(),
        Checks(),
    )


def flip(world: World, seed: int = 0, phase_s: float = PHASE_S) -> list[Stream]:
    """Play long prompts with short outputs, then the reverse; return all streams, ended."""
    random, at_s = Random(seed), 1.0
    streams: list[Stream] = []

    def arrival(request: GenerateRequest) -> Callable[[], None]:
        return lambda: streams.append(world.submit(request))

    while at_s < 1.0 + 2 * phase_s:
        prompts_first = at_s < 1.0 + phase_s
        at_s += random.expovariate(5.0)
        num_prompt, num_output = (100, 4) if prompts_first else (20, 50)
        request = GenerateRequest(
            request_id=f"r{at_s:.6f}",
            prompt=pack_tokens([random.randrange(1, 1 << 20) for _ in range(num_prompt)]),
            sampling=SamplingParams(max_tokens=num_output, seed=int(at_s * 1e6)),
        )
        world.heap.at(at_s, arrival(request))
    world.heap.run_until(1.0 + 2 * phase_s + 60.0)
    return streams


def num_inside(streams: list[Stream]) -> int:
    """Return how many requests kept both limits."""
    count = 0
    for stream in streams:
        times = stream.token_times_s
        if stream.finals[0].reason not in WELL or times[0] - stream.submitted_s > TTFT_S:
            continue
        gaps = sorted(after - before for before, after in pairwise(times))
        slowest = gaps[-max(1, len(gaps) // 10) :]
        count += sum(slowest) / len(slowest) <= TBT_S
    return count


def check(world: World, streams: list[Stream]) -> None:
    for stream in streams:
        check_stream(stream)
        check_ended(stream)
    check_quiet(world)
    check_index(world)


@pytest.mark.slow
def test_switching_keeps_more_requests_inside_their_limits() -> None:
    inside = {}
    for on in (False, True):
        world = cluster(role_switching=on)
        streams = flip(world)
        check(world, streams)
        inside[on] = num_inside(streams)
        changes = world.gateway.status(world.heap.now()).counters.get("roles_switched", 0)
        assert changes == 0 if not on else 2 <= changes <= 4, "there and back, not to and fro"
    assert inside[True] > 1.15 * inside[False], inside


def at_the_limit(seed: int, switching: bool) -> tuple[int, int]:
    """Return how many long prompts keep their limits, and the roles changed, on a cluster that is
    short of prefill and whose gaps between tokens lie just under their limit.
    """
    random, at_s, lines = Random(seed), 0.0, list[TraceLine]()
    while (at_s := at_s + random.expovariate(5.6)) < 60.0:
        length, first_id = random.randrange(6000, 12000), 100 * len(lines)
        ids = list(range(first_id, first_id - (-length // TRACE_BLOCK_TOKENS)))
        lines.append(
            TraceLine(
                timestamp=1e3 * at_s,
                input_length=length,
                output_length=random.randrange(150, 300),
                hash_ids=ids,
            )
        )
    scheduler = SchedulerConfig(
        role_switching=switching, role_switch_after_s=10.0, ttft_slo_s=TTFT_LIMIT_S, tbt_slo_s=GAP_S
    )
    simulation = Simulation(
        SimulationConfig(
            model=figures("llama3-70b", ModelFigures),
            hardware=figures("a800x8", HardwareFigures),
            num_prefill=4,
            num_decode=4,
            decode_pools=True,
            scheduler=scheduler,
            ttft_slo_s=TTFT_LIMIT_S,
            tbt_slo_s=GAP_S,
        ),
        Workload.replay(lines),
    )
    simulation.run()
    inside = sum(
        one.final in WELL and (one.ttft_s or 0.0) <= TTFT_LIMIT_S and one.slow_gap_s <= GAP_S
        for one in simulation.measures.requests
    )
    counters = simulation.world.gateway.status(simulation.world.heap.now()).counters
    return inside, int(counters.get("roles_switched", 0))


@pytest.mark.slow
def test_gaps_at_their_limit_have_no_worker_to_spare() -> None:
    """More prompts would be computed, and all of them would decode too slowly. A worker that
    changes all the same costs hardly anything: requests are placed otherwise from then on, and one
    of 228 was late.
    """
    without, _ = at_the_limit(0, switching=False)
    inside, changes = at_the_limit(0, switching=True)
    assert inside >= 0.98 * without
    assert changes <= 1


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_request_is_lost_when_workers_die_as_they_change(seed: int) -> None:
    random = Random(seed)
    network = NetworkConfig(loss=0.02, message_jitter_s=0.01)
    timeouts = {
        "heartbeat_timeout_s": 2.0, "stall_timeout_s": 6.0, "gap_timeout_s": 2.0,
        "max_attempts": 50, "replace_wait_s": 60.0, "ttft_slo_s": None, "tbt_slo_s": None,
    }  # fmt: skip
    world = cluster(seed, network, role_switching=True, **timeouts)
    victims = [worker_id for worker_id in world.workers if not worker_id.startswith("pool")]
    phase_s = 25.0
    killed: list[str] = []

    def disturb() -> None:
        draining = [view for view in world.conductor.views if view.draining]
        if not draining and random.random() < 0.1:
            world.change_role(random.choice(victims))
        if draining and random.random() < 0.4:
            killed.append(random.choice(victims))
            world.kill(killed[-1], noticed=random.random() < 0.5)
        if world.heap.now() < 2 * phase_s:  # then what is open has time to end
            world.heap.after(1.0, disturb)

    world.heap.after(1.0, disturb)
    streams = flip(world, seed, phase_s)
    assert killed, "nobody died while somebody changed"
    for stream in streams:
        check_stream(stream)
        check_ended(stream)
        final = stream.finals[0]
        nobody_was_up = final.failure is not None and final.failure.status == 503
        assert final.reason in WELL or nobody_was_up, final
