"""Random clusters under random faults, replayed from a seed.

A trial is a small cluster of the shipped machines with a few dozen requests and a few dozen faults.
`checkers` run after every event. The seed replays a failure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec

from mooncake.base import (
    GenerateRequest,
    KvLayout,
    PageArray,
    Priority,
    SamplingParams,
    pack_tokens,
)
from mooncake.base.machine import Machine
from mooncake.base.messages import Role
from mooncake.base.pool_messages import AnyMessage
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepPlan
from mooncake.engine.ranks.step_log import UsePages
from mooncake.instance.config import InstanceConfig
from mooncake.kvstore.config import KvStoreConfig, ObjectStoreConfig, SsdConfig
from mooncake.scheduler.config import POLICIES, SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.sim.faults.checkers import (
    SETTLED_S,
    check_ended,
    check_index,
    check_machine,
    check_quiet,
    check_stream,
    check_write,
    is_quiet,
)
from mooncake.sim.faults.injector import Injector
from mooncake.sim.faults.plan import GATEWAY, Fault, check_faults, random_fault
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import NetworkConfig
from mooncake.sim.world.ranks import RankedRunner
from mooncake.sim.world.runner import SimRunner
from mooncake.sim.world.world import SupervisorConfig, WorkerSpec, World, WorldConfig
from mooncake.telemetry.events import Recorders
from mooncake.transfer.engine import Region

BLOCK_TOKENS = 4
NUM_LAYERS = 3
LAYOUT = KvLayout(
    num_layers=NUM_LAYERS, block_tokens=BLOCK_TOKENS, kv_width=8, dtype="float8_e4m3fn",
    fingerprint="trial",
)  # fmt: skip
MAX_MODEL_LEN = 200
KEPT_EVENTS = 60
TWO_GATEWAYS = 0.3
"""The share of clusters that have two gateways."""
SEVERAL_RANKS = 0.5
"""The share of clusters in which some instances have several ranks: ranks of stages, or, for a role
with several instances, ranks that share experts.
"""
BY_HARDWARE = 0.3
"""The share of clusters whose writes go on while their process stands still, and cannot be
fenced.
"""
LONG_STOPS = 0.5
"""The share of clusters where some engines stand still until they are given up, and then go on."""
START_S = 1.5
SETTLE_S = 240.0
"""How long to run after the last fault, so that every time-out runs out."""
KEEP_S = 5.0
"""Seconds for which pools keep the prompts of every third request."""


class TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one seed."""

    seed: int
    num_events: int
    num_requests: int
    faults: dict[str, int]
    """How many faults of each kind happened."""
    injected: list[str]
    """Each fault as it happened, in order, with its time in seconds since the first request."""
    endings: dict[str, int]
    """Final events by reason."""
    failure: str | None
    last_events: list[str]
    """The last messages and faults before the failure; empty when all went well."""

    @property
    def rows(self) -> list[list[str]]:
        """Return the rows of the printed table, the header first."""
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
        endings = ", ".join(f"{count} {reason}" for reason, count in self.endings.items())
        return [
            ["", f"seed {self.seed}"],
            ["faults", faults or "none"],
            ["requests", f"{self.num_requests} ({endings})"],
            ["events, all checked", f"{self.num_events:,}"],
            ["checks", f"FAILED: {self.failure}" if self.failure else "all held"],
        ]


class _StepCost:
    """Step durations of a small model."""

    def __init__(self, fixed_s: float, token_s: float) -> None:
        self._fixed_s = fixed_s
        self._token_s = token_s

    def seconds(self, plan: StepPlan) -> float:
        return self._fixed_s + self._token_s * plan.num_tokens


def has_ranks(seed: int) -> bool:
    """Whether some instances of this seed's cluster have several ranks."""
    return _rank_random(seed).random() < SEVERAL_RANKS


def _rank_random(seed: int) -> Random:
    """Return the random source for ranks and their faults. It is separate, so that all other draws
    stay as they were.
    """
    return Random(f"ranks of seed {seed}")


class Trial:
    """One run of one seed, with random faults or with given ones."""

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None, source: str = "") -> None:
        """Raises ConfigError, with `source` in its message, when a given fault cannot happen to the
        cluster of this seed.
        """
        self.seed = seed
        self._random = Random(seed)
        self._trace: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._num_checked: dict[str, int] = {}
        self._orphans: set[str] = set()
        """Requests of a restarted gateway, whose clients are gone."""
        self._rank_random = _rank_random(seed)
        self._has_ranks = self._rank_random.random() < SEVERAL_RANKS
        self._exchange_s = self._rank_random.choice([0.5, 2.0])
        self._num_stages = self._rank_random.choice([1, 2]) if self._has_ranks else 1
        """The number of stages of each instance whose number of ranks it divides."""
        self._experts = self._has_ranks and self._num_stages == 1
        """Whether instances of a role share experts."""
        self._num_ranks: dict[str, int] = {}
        self._stop_random = Random(f"stops of seed {seed}")
        self._calm = NetworkConfig(
            writes_by_hardware=self._stop_random.random() < BY_HARDWARE,
            message_jitter_s=self._random.choice([0.0, 0.001, 0.02]),
            link_bytes_per_s=self._random.choice([1e4, 1e6, 50e9]),
            questions=True,
        )
        self._workers = self._specs()
        self._cost = _StepCost(
            self._random.choice([0.002, 0.01]), self._random.choice([1e-5, 1e-3])
        )
        self.world = World(
            self._config(), self._workers, self._make_runner, Recorders(), self._after_event
        )
        self._gateways = [GATEWAY]
        if self._random.random() < TWO_GATEWAYS:
            self._gateways.append("gateway-1")
            self.world.start_gateway("gateway-1")
        self.world.network.listener = self._hear
        self.world.network.on_write = partial(check_write, self.world)
        self._injector = Injector(self.world, self._trace.append, self._forget)
        self._given = faults
        if faults is not None:
            check_faults(faults, self._injector.names, source)

    @property
    def faults(self) -> list[Fault]:
        """The faults injected so far."""
        return self._injector.happened

    # ------------------------------------------------------------ playing

    def run(self) -> TrialReport:
        """Run to the end; a failed check is reported, not raised."""
        failure: str | None = None
        try:
            self._play()
        except AssertionError as error:
            failure = str(error) or "an assertion without a message"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        streams = self.world.streams.values()
        endings = Counter(stream.finals[0].reason.value for stream in streams if stream.finals)
        return TrialReport(
            seed=self.seed,
            num_events=self.world.heap.num_run,
            num_requests=len(streams),
            faults=dict(sorted(Counter(fault.kind for fault in self.faults).items())),
            injected=[str(fault) for fault in self.faults],
            endings=dict(sorted(endings.items())),
            failure=failure,
            last_events=list(self._trace) if failure else [],
        )

    def _play(self) -> None:
        world, random = self.world, self._random
        world.heap.run_until(START_S)
        duration_s = random.choice([1.0, 4.0, 12.0])
        num_requests = random.randrange(8, 32)
        prompts = [self._tokens(random.randrange(60)) for _ in range(3)]
        for index in range(num_requests):
            prompt = random.choice(prompts) + self._tokens(random.randrange(1, 40))
            at_s = START_S + random.random() * duration_s
            world.heap.at(at_s, self._submission(index, prompt))
        faults = self._given
        if faults is None:
            names = self._injector.names
            faults = [
                random_fault(random, names, random.random() * duration_s * 1.5)
                for _ in range(random.randrange(1, 12))
            ]
            if names.ranks:
                ranks = self._rank_random
                faults += [
                    random_fault(ranks, names, ranks.random() * duration_s, of_rank=True)
                    for _ in range(ranks.randrange(1, 4))
                ]
            faults += self._long_stops(duration_s)
        self._injector.schedule(faults, START_S)
        # A worker that stands still at the end has neither died with its group nor come back with
        # it.
        last_s = max((fault.at_s + (fault.seconds or 0.0) for fault in faults), default=0.0)
        self._settle(START_S + max(duration_s * 1.5, last_s) + 5.0)
        for name, stream in world.streams.items():
            check_stream(stream)
            if name not in self._orphans:
                check_ended(stream)
        check_quiet(world)
        check_index(world)

    def _long_stops(self, duration_s: float) -> list[Fault]:
        """Draw engines that stop for longer than a gateway waits for their sign of life."""
        random, names = self._stop_random, self._injector.names
        engines = [name for name in names.workers if name not in names.pools]
        if random.random() >= LONG_STOPS:
            return []
        return [
            Fault(
                at_s=random.random() * duration_s, kind="hang", target=random.choice(engines),
                seconds=random.choice([3.0, 6.0, 12.0]),
            )
            for _ in range(random.randrange(1, 4))
        ]  # fmt: skip

    def _settle(self, after_s: float) -> None:
        """Run until the cluster is quiet, or until the time for that is up."""
        heap = self.world.heap
        heap.run_until(after_s)
        while heap.now() < after_s + SETTLE_S and not is_quiet(self.world):
            heap.run_until(heap.now() + 5.0)
        heap.run_until(heap.now() + SETTLED_S)

    def _submission(self, index: int, prompt: list[int]) -> Callable[[], None]:
        random = self._random
        request = GenerateRequest(
            request_id=f"r{index}",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=random.choice([1, 2, 12, 40]), seed=index),
            tenant=random.choice(["", "", "other"]),
            priority=random.choice([Priority.INTERACTIVE, *Priority]),
            timeout_s=None,
            num_kept_tokens=0 if index % 3 else len(prompt),
            keep_s=0.0 if index % 3 else KEEP_S,
        )
        aborted_s = random.choice([0.0, 0.05, 0.5]) if random.random() < 0.12 else None
        gateway_id = random.choice(self._gateways)

        def abort() -> None:
            self.world.abort(request.request_id, gateway_id)

        def submit() -> None:
            self._note(f"submit {request.request_id}, {len(prompt)} tokens")
            self.world.submit(request, gateway_id)
            if aborted_s is not None:
                self.world.heap.after(aborted_s, abort)

        return submit

    def _forget(self) -> None:
        """Forget the requests of a gateway that restarts, because no final event will come for
        them.
        """
        self._orphans |= {name for name, s in self.world.streams.items() if not s.finals}

    # ------------------------------------------------------------ looking

    def _after_event(self, machine: Machine) -> None:
        check_machine(machine)
        if not isinstance(machine, Gateway):
            return  # no stream goes on
        for name, stream in self.world.streams.items():
            known = self._num_checked.get(name, 0)
            if len(stream.tokens) != known or len(stream.finals) > 1:
                check_stream(stream, known)
                self._num_checked[name] = len(stream.tokens)

    def _hear(self, source: str, target: str, message: AnyMessage) -> None:
        name = type(message).__name__
        if name not in ("LoadReport", "BlockEvents"):
            request = getattr(message, "request_id", "") or getattr(message, "ticket", "")
            self._note(f"{source} -> {target}  {name} {request}")

    def _note(self, text: str) -> None:
        self._trace.append(f"{self.world.heap.now():9.4f}  {text}")

    # ------------------------------------------------------------ the cluster

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, 97) for _ in range(count)]

    def _specs(self) -> list[WorkerSpec]:
        random = self._random
        pools = random.random() < 0.8
        workers: list[WorkerSpec] = []
        for role, count in (
            (Role.PREFILL, random.randrange(0, 4)),
            (Role.DECODE, random.randrange(1, 4)),
        ):
            shared = role.value if self._experts and count > 1 else ""
            for index in range(count):
                name = f"{role.value}-{index}"
                workers.append(
                    WorkerSpec(worker_id=name, role=role, node_id=f"node-{name}", experts=shared)
                )
                if pools:
                    workers.append(
                        WorkerSpec(
                            worker_id=f"kvstore-{name}", role=Role.KVSTORE, node_id=f"node-{name}"
                        )
                    )
        return workers

    def _config(self) -> WorldConfig:
        random, layout = self._random, LAYOUT
        return WorldConfig(
            layout=layout,
            engine={role: self._engine() for role in (Role.PREFILL, Role.DECODE)},
            kvstore=KvStoreConfig(
                dram_bytes=random.choice([16, 64, 256]) * layout.block_bytes,
                quarantine_s=6.0,
                doubt_interval_s=2.0,
                ssd=_disks_of(random.choice([0, 8, 200]) * layout.block_bytes),
                ssd_min_uses=random.choice([1, 2]),
                ssd_write_at=random.choice([0.0, 0.7]),
                ssd_retry_s=1.0,
                object_store=self._bucket(),
                object_list_s=5.0,
            ),
            instance=InstanceConfig(
                quarantine_s=6.0, push_timeout_s=5.0, hold_s=random.choice([0.02, 0.3, 10.0])
            ),
            scheduler=SchedulerConfig(
                policy=random.choice(POLICIES),
                fetch_latency_s=random.choice([0.0, 0.002]),
                remote_bytes_per_s=random.choice([1e9, 1e12]),
                max_attempts=50,
                replace_wait_s=60.0,
                heartbeat_timeout_s=2.0,
                stall_timeout_s=20.0,
                whole_on_decode_max_tokens=random.choice([0, 16]),
            ),
            network=self._calm,
            supervisor=SupervisorConfig(restart_s=random.choice([0.2, 1.0, 4.0])),
            max_skew_s=random.choice([0.0, 1000.0]),
            seed=self.seed,
        )

    def _bucket(self) -> ObjectStoreConfig | None:
        num_blocks = Random(f"bucket {self.seed}").choice([0, 0, 20, 1000])  # as in `_engine`
        num_bytes = num_blocks * LAYOUT.block_bytes
        return ObjectStoreConfig(bucket="b", num_bytes=num_bytes) if num_blocks else None

    def _engine(self) -> EngineConfig:
        limits = Random(f"limits {self.seed}")  # of its own: other draws stay as they were
        return EngineConfig(
            num_blocks=self._random.choice([48, 128]),
            max_num_seqs=8,
            max_batched_tokens=24,
            max_chunk_tokens=self._random.randrange(1, 24),
            max_model_len=MAX_MODEL_LEN,
            max_waiting=64,
            block_tokens=BLOCK_TOKENS,
            max_steps_in_flight=self._num_stages + self._random.choice([0, 1]),
            num_stages=self._num_stages,
            step_timeout_s=self._random.choice([3, 10]),
            max_gap_s=limits.choice([None, 0.001, 0.05]),
            first_token_s=limits.choice([None, 0.2, 5.0]),
            max_gap_is_target=limits.choice([False, True]),
        )

    def _make_runner(
        self,
        spec: WorkerSpec,
        heap: EventHeap,
        pages: Region,
        deliver: Callable[[msgspec.Struct], None],
    ) -> SimRunner:
        settings: Any = {"num_layers": NUM_LAYERS, "num_layer_reports": NUM_LAYERS}
        num_ranks = self._ranks_of(spec.experts or spec.worker_id)
        stages = self._num_stages
        if num_ranks % stages == 0:
            settings |= {"num_stages": stages, "send_s": lambda _: 1e-4}
        if num_ranks == 1 and not spec.experts:
            return SimRunner(heap, self._cost, deliver, **settings)
        return RankedRunner(
            heap, self._cost, deliver, **settings, num_ranks=num_ranks,
            pages=UsePages(PageArray(LAYOUT, pages.num_bytes // LAYOUT.block_bytes), None),
            exchange_s=self._exchange_s,
        )  # fmt: skip

    def _ranks_of(self, name: str) -> int:
        """Return the number of ranks of an instance, or of each instance that shares its experts.
        It is the same at each start.
        """
        if not self._has_ranks:
            return 1
        if name not in self._num_ranks:
            counts = [1, 2, 4] if self._num_ranks else [2, 4]
            self._num_ranks[name] = self._rank_random.choice(counts)
        return self._num_ranks[name]


def _disks_of(num_bytes: int) -> list[SsdConfig]:
    return [SsdConfig(directory="/ssd", num_bytes=num_bytes)] if num_bytes else []


def replay_command(seed: int) -> str:
    return f"mooncake simulate --faults random --seed {seed}"


def describe_failure(report: TrialReport, command: str | None = None) -> str:
    """Return the text that describes a failed run; `command` replays it."""
    return "\n".join(
        [
            f"seed {report.seed} failed: {report.failure}",
            f"replay it with: {command or replay_command(report.seed)}",
            f"the last {len(report.last_events)} messages and faults before it:",
            *report.last_events,
        ]
    )
