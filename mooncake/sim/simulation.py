"""A trace on a simulated cluster: builds the world, plays the clients, takes the measures.

It makes no decision about requests; the shipped machines do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec

from mooncake.base import ConfigError, PageArray, Shape
from mooncake.base.messages import Role
from mooncake.base.request import OutputEvent, SamplingParams
from mooncake.engine.config import EngineConfig
from mooncake.engine.prompt_time import SLACK
from mooncake.engine.ranks.step_log import UsePages
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig, ObjectStoreConfig, SsdConfig
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.measure import Measures
from mooncake.sim.scaling import BUSY, FIXED, RULES, Autoscaler, BusyRule, FollowPolicy, Rule
from mooncake.sim.timeline import Watch
from mooncake.sim.workload import STOP_TOKEN, TRACE_BLOCK_TOKENS, Arrival, Workload
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.cost_model import (
    ExpertSends,
    HardwareFigures,
    InstanceCost,
    ModelFigures,
    sim_layout,
)
from mooncake.sim.world.disk import SimBucket, SimDiskConfig
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.process import AfterEvent
from mooncake.sim.world.ranks import RankedRunner
from mooncake.sim.world.runner import SimRunner, token_at
from mooncake.sim.world.world import WorkerSpec, World, WorldConfig
from mooncake.transfer.engine import Region

START_S = 2.0
"""When the first request comes. By then all workers have been welcomed."""
LAYER_GROUPS = 4
EXCHANGE_S = 30.0
"""The time limit of an exchange between ranks, as in `launch.worker.ranks.rank_processes`."""
REPORT_INTERVAL_S = 1.0
COUPLED = ("coupled", "coupled-prefix", "coupled-chunked", "coupled-chunked-prefix")
"""Baselines in which every node is one engine that computes prompts and decodes: plain, with a
prefix cache in its own HBM, with prompts in chunks beside decode (Mooncake, FAST'25, 5.1, has these
three), or with both, as engines are today.
"""
ENGINES = ("mooncake", *COUPLED)


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelFigures
    hardware: HardwareFigures
    shape: Shape | None = None
    """The shape of every instance. None: all GPUs of as few nodes as hold the weights, which share
    out the KV.
    """
    expert_sends: ExpertSends | None = None
    """How rows get to experts that instances share; None: all ranks gather all rows."""
    num_played: int | None = None
    """How many of an engine's instances that share experts are simulated, each as if all others had
    as many rows as itself. None: all are simulated, and step together.
    """
    num_prefill: int
    """The number of prefill engines. An engine whose experts are shared is as many instances as
    share them.
    """
    num_decode: int
    engine: str = "mooncake"
    scheduler: SchedulerConfig = SchedulerConfig()
    ttft_slo_s: float = 30.0
    """The TTFT limit of an effective request. The scheduler's limits decide whether the cluster
    *refuses* requests for it.
    """
    tbt_slo_s: float = 0.1
    plan_by_limits: bool = False
    """Whether engines plan their steps for these limits, as served ones do: as limits where the
    scheduler has one on gaps, otherwise as targets.
    """
    block_tokens: int = TRACE_BLOCK_TOKENS
    """The tokens of a block. A trace names those of the default."""
    pool_tokens: int = 3_000_000
    """The DRAM pool of each prefill instance in tokens (Mooncake, FAST'25: about 1 TB per node of
    LLaMA3-70B). 0: no pool, so only HBM caches.
    """
    hbm_tokens: int | None = None
    """The tokens of KVCache in each instance, instead of what the model leaves free."""
    ssd_tokens: int = 0
    """The SSD behind each of those pools, in tokens."""
    ssd_min_uses: int = 2
    """Blocks that were asked for this many times go to the SSD; 1: all do."""
    ssd_bytes_per_s: float = 3e9
    """The speed of each of those disks."""
    object_tokens: int = 0
    """What each of those pools uses of a bucket that they share, in tokens."""
    object_min_uses: int = 2
    """Blocks that were asked for this many times go to the bucket; 1: all do."""
    object_bytes_per_s: float = 1e9
    """The speed at which each pool reads and writes the bucket."""
    decode_pools: bool = False
    """Whether decode instances have pools too. A trace names no output, so nothing in them is used
    again.
    """
    prefill_chunk_tokens: int = 8192
    coupled_chunk_tokens: int = 512
    max_num_seqs: int = 512
    """The seats in a decode batch."""
    link_bytes_per_s: float | None = None
    """The link speed to use instead of the hardware's."""
    scaling: str = FIXED
    """Who decides the number of instances, inside the bounds of `scheduler.autoscale`: see
    `sim.scaling.RULES`. `num_prefill` and `num_decode` are those at the start.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine: {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.scaling not in RULES:
            raise ConfigError(f"scaling: {self.scaling!r} is not one of {', '.join(RULES)}")
        if self.scaling != FIXED and (self.scheduler.autoscale is None or self.engine in COUPLED):
            raise ConfigError(
                f"scaling: {self.scaling} needs bounds (`autoscale`) and prefill instances"
            )
        if self.num_decode < (self.scaling == FIXED) or self.num_prefill < 0:
            raise ConfigError(
                "prefill, decode: a cluster needs at least 1 decode instance, and the number of "
                "prefill instances must be at least 0"
            )
        if self.engine in COUPLED and self.num_prefill:
            raise ConfigError(
                f"{self.engine}: a coupled engine has no prefill instances; give "
                "`decode` instances only"
            )


class Simulation:
    """One run of one workload."""

    def __init__(
        self,
        config: SimulationConfig,
        workload: Workload,
        after_event: AfterEvent | None = None,
        on_output: Callable[[Arrival, OutputEvent], None] | None = None,
        *,
        with_ranks: bool = False,
    ) -> None:
        """Build the world.

        after_event: is called with each machine after its events. on_output: is called with every
        event that clients receive. with_ranks: an instance of a given shape is as many processes,
        which may fail one by one. Otherwise the shape sets only the duration of its steps.
        Instances that share experts are separate workers in both cases.
        """
        self._with_ranks = with_ranks and config.shape is not None
        self._on_output = on_output
        self.config = config
        self.workload = workload
        self.cost = InstanceCost(config.model, config.hardware, config.shape, config.expert_sends)
        if self.cost.shape.pp > LAYER_GROUPS:
            raise ConfigError(f"shape: the simulator has at most {LAYER_GROUPS} stages")
        most = self.cost.shape.dp
        if config.num_played is not None and not 1 <= config.num_played <= most:
            raise ConfigError(f"num_played: {config.num_played} of {most} instances of an engine")
        self.layout = sim_layout(config.model, config.block_tokens, LAYER_GROUPS)
        self.measures = Measures()
        self._lengths = workload.output_lengths
        self._max_model_len = max(config.model.max_model_len, workload.max_model_len)
        bucket = SimBucket()
        bucket.slowdown = config.ssd_bytes_per_s / config.object_bytes_per_s
        self.world = World(
            self._world_config(), self._specs(), self._make_runner, self.measures, after_event,
            bucket,
        )  # fmt: skip
        self._next = 0
        self.scaler = Autoscaler(self.world, config.scheduler.scaling, self._rule(), self._specs_of)
        self.watch = Watch(self.world, self.measures, config.ttft_slo_s, config.tbt_slo_s)

    @property
    def num_nodes(self) -> int:
        engines = self.config.num_prefill + self.config.num_decode
        instances = engines * self.cost.shape.dp
        return math.ceil(instances * self.cost.node_share)

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run the whole workload; `progress` is called with (ended requests, all requests)."""
        heap, num = self.world.heap, len(self.workload.arrivals)
        heap.at(START_S, self._arrive)
        counts = {Role.PREFILL: self.config.num_prefill, Role.DECODE: self.config.num_decode}
        heap.at(START_S, lambda: self.scaler.begin(counts))
        self.watch.start(START_S, START_S + self.workload.duration_s)
        while self.measures.num_ended < num:
            heap.run_until(heap.now() + 1.0)
            if progress is not None:
                progress(self.measures.num_ended, num)

    # ------------------------------------------------------------ clients

    def _arrive(self) -> None:
        """Submit the requests that are due and schedule the next arrival."""
        arrivals, heap = self.workload.arrivals, self.world.heap
        now = heap.now()
        while self._next < len(arrivals) and START_S + arrivals[self._next].at_s <= now:
            self._submit(arrivals[self._next], now)
            self._next += 1
        if self._next < len(arrivals):
            heap.at(START_S + arrivals[self._next].at_s, self._arrive)

    def _submit(self, arrival: Arrival, now: float) -> None:
        measure = self.measures.begin(arrival, now)
        heap = self.world.heap
        self.watch.count_blocks(arrival)
        request = arrival.request(self._max_model_len)

        def receive(event: OutputEvent) -> None:
            if self._on_output is not None:
                self._on_output(arrival, event)
            measure.receive(event, heap.now())

        self.world.send(request, receive)

    # ------------------------------------------------------------ the cluster

    def _oracle(self, sampling: SamplingParams, position: int) -> int:
        """Return the token oracle. A request's seed is its index in the workload."""
        return self.token(sampling.seed, position)

    def token(self, index: int, position: int) -> int:
        """Return the token of a request at an output position. The recorded length ends
        the output.
        """
        if position + 1 >= self._lengths[index]:
            return STOP_TOKEN
        return token_at(index, position)

    def _make_runner(
        self,
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> SimRunner:
        shape, layout = self.cost.shape, self.layout
        num_ranks = shape.num_ranks if self._with_ranks else 1
        if num_ranks == 1 and not spec.experts:
            return SimRunner(
                heap,
                self.cost,
                deliver,
                num_layers=LAYER_GROUPS,
                oracle=self._oracle,
                num_stages=shape.pp,
                send_s=self.cost.send_s,
            )
        return RankedRunner(
            heap, self.cost, deliver, num_layers=LAYER_GROUPS, oracle=self._oracle,
            num_stages=shape.pp, send_s=self.cost.send_s,
            num_ranks=num_ranks, exchange_s=EXCHANGE_S, together_s=self.cost.seconds_together,
            pages=UsePages(PageArray(layout, pages.num_bytes // layout.block_bytes), None),
        )  # fmt: skip

    def _specs(self) -> list[WorkerSpec]:
        config = self.config
        counts = ((Role.PREFILL, config.num_prefill), (Role.DECODE, config.num_decode))
        return [
            spec
            for role, count in counts
            for number in range(count)
            for spec in self._specs_of(role, number)
        ]

    def _specs_of(self, role: Role, number: int) -> list[WorkerSpec]:
        """Return the workers of an engine: its instances, and the pool of each one's node."""
        config = self.config
        workers: list[WorkerSpec] = []
        shared = config.num_played or self.cost.shape.dp
        alone = config.num_played is not None or shared == 1
        pools = {Role.PREFILL: config.engine == "mooncake", Role.DECODE: config.decode_pools}
        for index in range(number * shared, (number + 1) * shared):
            node = f"{role.value}-node-{index}"
            experts = f"{role.value}-engine-{number}" if not alone else ""
            workers.append(
                WorkerSpec(
                    worker_id=f"{role.value}-{index}", role=role, node_id=node, experts=experts
                )
            )
            if pools[role] and config.pool_tokens:
                name = f"kvstore-{role.value}-{index}"
                workers.append(WorkerSpec(worker_id=name, role=Role.KVSTORE, node_id=node))
        return workers

    def _rule(self) -> Rule | None:
        """Return what decides the number of instances while the cluster runs, if anything does."""
        config = self.config
        if config.scaling == FIXED:
            return None
        if self.cost.shape.dp > 1:
            raise ConfigError("scaling: instances that share experts keep their number")
        if config.scaling == BUSY:
            return BusyRule(self.world, config.scheduler.scaling)
        return FollowPolicy(self.world)

    def _world_config(self) -> WorldConfig:
        config, hardware = self.config, self.config.hardware
        engines = self._engines()
        link = config.link_bytes_per_s or self.cost.link_bytes_per_s
        dram = self.cost.node_share * hardware.dram_bytes_per_s
        copies = self.cost.page_copies
        scheduler = msgspec.structs.replace(
            config.scheduler,
            local_bytes_per_s=dram / copies,
            remote_bytes_per_s=min(link, dram) / copies,
            ssd_bytes_per_s=config.ssd_bytes_per_s,
            object_bytes_per_s=config.object_bytes_per_s,
            max_inflight=max(config.scheduler.max_inflight, 1 << 16),
        )
        chunk = engines[Role.DECODE].max_chunk_tokens
        return WorldConfig(
            layout=self.layout,
            engine=engines,
            kvstore=KvStoreConfig(
                dram_bytes=max(1, config.pool_tokens // config.block_tokens)
                * self.layout.block_bytes,
                report_interval_s=REPORT_INTERVAL_S,
                ssd=self._ssd(),
                ssd_min_uses=config.ssd_min_uses,
                object_store=self._object_store(),
                object_min_uses=config.object_min_uses,
            ),
            disk=SimDiskConfig(bytes_per_s=config.ssd_bytes_per_s),
            instance=InstanceConfig(
                report_interval_s=REPORT_INTERVAL_S,
                fetch_timeout_s=60.0,
                push_timeout_s=300.0,
                hold_s=120.0,
                max_reservations=1 << 16,
            ),
            scheduler=scheduler,
            network=NetworkConfig(
                link_bytes_per_s=link,
                local_bytes_per_s=dram,
                transfer_latency_s=hardware.transfer_latency_s,
            ),
            profile={
                Role.PREFILL: self.cost.profile(Role.PREFILL, config.prefill_chunk_tokens, 1),
                Role.DECODE: self.cost.profile(Role.DECODE, 1, 256)
                + (self.cost.profile(Role.PREFILL, chunk, 1) if not config.num_prefill else []),
            },
            page_copies=copies,
            seed=config.seed,
        )

    def _ssd(self) -> list[SsdConfig]:
        num_bytes = self.config.ssd_tokens // self.config.block_tokens * self.layout.block_bytes
        return [SsdConfig(directory="/ssd", num_bytes=num_bytes)] if num_bytes else []

    def _object_store(self) -> ObjectStoreConfig | None:
        num_bytes = self.config.object_tokens // self.config.block_tokens * self.layout.block_bytes
        return ObjectStoreConfig(bucket="bucket", num_bytes=num_bytes) if num_bytes else None

    def _engines(self) -> dict[Role, EngineConfig]:
        config = self.config
        num_blocks = (config.hbm_tokens or self.cost.kv_tokens) // config.block_tokens
        make = partial(
            EngineConfig,
            num_blocks=num_blocks,
            max_model_len=self._max_model_len + 1,
            max_waiting=1 << 16,
            block_tokens=config.block_tokens,
            num_stages=self.cost.shape.pp,
            max_steps_in_flight=self.cost.shape.pp + 1 if self.cost.shape.pp > 1 else 1,
            max_gap_s=config.tbt_slo_s / SLACK if config.plan_by_limits else None,
            max_gap_is_target=config.scheduler.tbt_slo_s is None,
            first_token_s=config.ttft_slo_s / SLACK if config.plan_by_limits else None,
        )
        chunk = config.prefill_chunk_tokens
        prefill = make(max_num_seqs=8, max_batched_tokens=chunk, max_chunk_tokens=chunk)
        whole = self._max_model_len
        if config.engine in ("coupled-chunked", "coupled-chunked-prefix"):
            whole = config.coupled_chunk_tokens
        decode = make(
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=max(whole, config.max_num_seqs),
            max_chunk_tokens=whole,
            enable_prefix_caching=config.engine not in ("coupled", "coupled-chunked"),
        )
        return {Role.PREFILL: prefill, Role.DECODE: decode}
