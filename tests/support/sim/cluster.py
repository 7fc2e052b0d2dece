"""A small simulated cluster whose runners keep verifiable bytes in their pages: wrong KV anywhere
gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from mooncake.base import (
    CostSample,
    FinishReason,
    GenerateRequest,
    Grammar,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepPlan, StepResult
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.faults.checkers import check_write, is_quiet
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.world import SupervisorConfig, WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import EventList
from mooncake.transfer.engine import Region
from tests.support.engine.fake_runner import FakeRunner, expected_output, small_layout

LAYOUT = small_layout(num_layers=3)
MAX_MODEL_LEN = 200
STEP_S = 0.003
REST_S = 30.0
"""What has ended must stay so for as long: more than transfers, quarantines and holds take here."""


class HeapRunner:
    """Runs a `FakeRunner` in simulated time, one event every `STEP_S`."""

    def __init__(
        self, heap: EventHeap, inner: FakeRunner, deliver: Callable[[msgspec.Struct], None]
    ) -> None:
        self.inner = inner
        self._heap = heap
        self._deliver = deliver
        self._running = False

    def prepare(self, grammar: Grammar) -> None:
        self.inner.prepare(grammar)

    def submit(self, plan: StepPlan) -> None:
        self.inner.submit(plan)
        if not self._running:
            self._running = True
            self._heap.after(STEP_S, self._next)

    def _next(self) -> None:
        for event in self.inner.poll(limit=1):
            self._running = not isinstance(event, StepResult)
            if self._running:
                self._heap.after(STEP_S, self._next)
            self._deliver(event)


def engine_config(num_blocks: int = 128, **changes: int) -> EngineConfig:
    """Return a small engine; chunks are no multiple of the block size on purpose."""
    settings = {
        "num_blocks": num_blocks,
        "max_num_seqs": 8,
        "max_batched_tokens": 24,
        "max_chunk_tokens": 10,
        "max_model_len": MAX_MODEL_LEN,
        "max_waiting": 64,
        "block_tokens": LAYOUT.block_tokens,
    }
    return EngineConfig(**{**settings, **changes})


def specs(num_prefill: int, num_decode: int, *, kvstores: bool = True) -> list[WorkerSpec]:
    """Return workers with one instance a node, and a pool on each node."""
    workers = []
    for role, count in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode)):
        for index in range(count):
            name = f"{role.value}-{index}"
            workers.append(WorkerSpec(worker_id=name, role=role, node_id=f"node-{name}"))
            if kvstores:
                pool = f"kvstore-{name}"
                workers.append(
                    WorkerSpec(worker_id=pool, role=Role.KVSTORE, node_id=f"node-{name}")
                )
    return workers


def ssd_of(num_blocks: int) -> list[SsdConfig]:
    """Return one simulated disk for so many blocks, or none."""
    size = num_blocks * LAYOUT.block_bytes
    return [SsdConfig(directory="/ssd", num_bytes=size)] if size else []


class Cluster:
    """A world with verifiable KV, and the questions tests ask of it."""

    def __init__(
        self,
        workers: list[WorkerSpec],
        *,
        prefill: EngineConfig | None = None,
        decode: EngineConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        network: NetworkConfig | None = None,
        instance: InstanceConfig | None = None,
        pool_blocks: int = 256,
        ssd_blocks: int = 0,
        restart_s: float | None = 2.0,
        seed: int = 0,
        profile: list[CostSample] | None = None,
    ) -> None:
        """`profile`: what prefill workers say of their speed."""
        self.events = EventList()
        self.world = World(
            WorldConfig(
                layout=LAYOUT,
                engine={
                    Role.PREFILL: prefill or engine_config(),
                    Role.DECODE: decode or engine_config(),
                },
                kvstore=KvStoreConfig(
                    dram_bytes=pool_blocks * LAYOUT.block_bytes,
                    quarantine_s=1.0,
                    ssd=ssd_of(ssd_blocks),
                    ssd_min_uses=1,
                    ssd_write_at=0.0,
                ),
                instance=instance or InstanceConfig(quarantine_s=1.0, push_timeout_s=5.0),
                scheduler=scheduler or SchedulerConfig(),
                network=network or NetworkConfig(encode=True, message_jitter_s=0.002),
                supervisor=SupervisorConfig(restart_s=restart_s),
                profile={Role.PREFILL: profile} if profile is not None else {},
                with_bytes=True,
                seed=seed,
            ),
            workers,
            self._make_runner,
            self.events,
        )
        self.world.network.on_write = partial(check_write, self.world)
        self.world.heap.run_until(1.5)

    @staticmethod
    def _make_runner(
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> HeapRunner:
        del spec
        num_pages = pages.num_bytes // LAYOUT.block_bytes
        return HeapRunner(heap, FakeRunner(LAYOUT, num_pages, memory=pages.buffer), deliver)

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.world.heap.run_until(self.world.heap.now() + seconds)

    def settle(self, most_s: float) -> None:
        """Let simulated time pass until nobody has work left, and `REST_S` more: `most_s` in all at
        most. Minutes of heartbeats show nothing else.
        """
        last_s = self.world.heap.now() + most_s
        while self.world.heap.now() < last_s and not is_quiet(self.world):
            self.run(5.0)
        self.world.heap.run_until(min(last_s, self.world.heap.now() + REST_S))

    def counter(self, name: str, worker_prefix: str = "") -> float:
        """Return the sum of a counter over living workers whose id starts so."""
        total = 0.0
        for worker_id, worker in self.world.workers.items():
            if worker.machine is None or not worker_id.startswith(worker_prefix):
                continue
            if worker.spec.role is not Role.KVSTORE:
                total += worker.machine.instance.load().counters.get(name, 0)
        return total

    def pools(self) -> list[KvNode]:
        """Return the living pool nodes."""
        machines = [machine for _, machine in self.world.machines()]
        return [machine for machine in machines if isinstance(machine, KvNode)]

    def check_integrity(self) -> None:
        for _, machine in self.world.machines():
            machine.check_integrity()

    def check_streams(self, *, may_refuse: bool = False) -> None:
        """Each request has one final event; those that succeeded have the oracle's tokens. With
        `may_refuse` a request may be told at once that no worker is up.
        """
        for stream in self.world.streams.values():
            name = stream.request.request_id
            assert len(stream.finals) == 1, f"{name}: {len(stream.finals)} final events"
            final = stream.finals[0]
            expected = expected_output(LAYOUT, stream.request, max_model_len=MAX_MODEL_LEN)
            if final.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert stream.tokens == expected, f"{name}: other tokens than the oracle's"
                assert final.num_output_tokens == len(expected)
            else:
                assert stream.tokens == expected[: len(stream.tokens)], f"{name}: wrong tokens"
                refused = may_refuse and final.reason is FinishReason.REJECTED
                assert refused or final.reason is FinishReason.ABORT, f"{name}: {final}"

    def check_quiet(self) -> None:
        """Nothing is left of any request on any worker."""
        self.check_integrity()
        assert all(host.gateway.idle for host in self.world.gateway_hosts.values())
        for worker_id, worker in self.world.workers.items():
            if worker.machine is not None and worker.spec.role is not Role.KVSTORE:
                assert worker.machine.quiet, f"{worker_id} still has something to do"


def request(
    name: str, prompt_tokens: list[int], max_tokens: int = 8, **sampling: object
) -> GenerateRequest:
    """Return a greedy-like request of the fake model."""
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens(prompt_tokens),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )
