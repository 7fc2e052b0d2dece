"""Faults that were written down: on a small cluster and on a trace, checked after every event."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import ConfigError, FinishReason, KvLayout, SamplingParams, Shape
from mooncake.base.messages import Role
from mooncake.kvstore.storage.disk import DiskBlock
from mooncake.sim.faults.injector import Injector
from mooncake.sim.faults.plan import Fault
from mooncake.sim.faults.random_faults import Trial
from mooncake.sim.faults.run import FaultyRun
from mooncake.sim.simulation import SimulationConfig
from mooncake.sim.workload import Workload
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks, SimMedium
from tests.support.sim.cluster import Cluster, request, specs
from tests.support.sim.traces import hardware, model, sessions

KILLS = [
    Fault(at_s=1.0, kind="kill", target="prefill-0"),
    Fault(at_s=1.2, kind="kill_node", target="decode-node-1"),
    Fault(at_s=2.0, kind="cut", target="prefill-node-1", other="decode-node-0", seconds=2.0),
    Fault(at_s=2.5, kind="skew", target="decode-0", amount=3.0),
    Fault(at_s=3.0, kind="lose", seconds=2.0, amount=0.1),
]


def config(**changes: object) -> SimulationConfig:
    base = SimulationConfig(model=model(), hardware=hardware(), num_prefill=2, num_decode=2)
    return msgspec.structs.replace(base, **changes)


def test_a_trace_outlives_what_is_done_to_its_cluster() -> None:
    run = FaultyRun(config(), Workload.replay(sessions(40)), KILLS, "kills")
    report = run.run()
    assert report.failure is None, report.last_events
    assert report.faults == {"cut": 1, "kill": 1, "kill_node": 1, "lose": 1, "skew": 1}
    assert report.endings == {"stop": 40}
    assert [line.split()[2] for line in report.injected] == [fault.kind for fault in KILLS]


def test_ranks_of_a_shape_are_processes() -> None:
    faults = [
        Fault(at_s=1.0, kind="kill_rank", target="prefill-0/3"),
        Fault(at_s=1.5, kind="hang_rank", target="decode-1/1", seconds=60.0),
        Fault(at_s=2.0, kind="slow_rank", target="decode-0/2", seconds=2.0, amount=2.0),
    ]
    shaped = config(shape=Shape(tp=4))
    run = FaultyRun(shaped, Workload.replay(sessions(12)), faults, "ranks")
    report = run.run()
    assert report.failure is None, report.last_events
    assert report.endings == {"stop": 12}
    starts = {name: one.num_starts for name, one in run.simulation.world.workers.items()}
    assert {name for name, number in starts.items() if number == 2} == {"prefill-0", "decode-1"}
    with pytest.raises(ConfigError, match="no 'decode-0/2' in this cluster"):
        FaultyRun(config(), Workload.replay(sessions(12)), faults[2:], "one rank each")


def test_puts_go_on_after_words_within_a_node_were_lost() -> None:
    """A put whose question was lost waited for as long as a push may take: 300 s here."""
    node = "prefill-node-0"
    cut = Fault(at_s=1.6755, kind="cut", target=node, other=node, seconds=4.0)
    report = FaultyRun(config(seed=1), Workload.replay(sessions(12)), [cut], "cut").run()
    assert report.failure is None, report.last_events
    assert report.endings == {"stop": 12}


def test_requests_of_a_restarted_gateway_are_counted_as_forgotten() -> None:
    faults = [Fault(at_s=4.0, kind="restart_gateway")]
    run = FaultyRun(config(), Workload.replay(sessions(40)), faults, "restart")
    report = run.run()
    assert report.failure is None, report.last_events
    assert report.endings["forgotten by a restarted gateway"] > 0
    assert sum(report.endings.values()) == 40
    assert {r.final for r in run.simulation.measures.requests} >= {None, FinishReason.STOP}


def test_faults_that_are_drawn_come_from_the_seed() -> None:
    def play(seed: int) -> list[str]:
        report = FaultyRun(config(seed=seed), Workload.replay(sessions(12)), None, "random").run()
        assert report.failure is None, report.last_events
        return report.injected

    assert play(1) == play(1) != play(2)


class OneAhead:
    """What a runner would know of a sequence that had lost a token."""

    def __init__(self, sampling: SamplingParams, num_outputs: int) -> None:
        self.sampling = sampling
        self.num_outputs = num_outputs + 1


def test_a_wrong_token_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.sim.world.runner._Known", OneAhead)
    report = FaultyRun(config(), Workload.replay(sessions(3)), [], "none").run()
    assert report.failure is not None
    assert "r0: token 0 is" in report.failure
    assert report.last_events


def test_faults_of_another_cluster_are_refused() -> None:
    faults = [Fault(at_s=0, kind="kill", target="prefill-9")]
    with pytest.raises(ConfigError, match="mine, fault 1: no 'prefill-9'"):
        FaultyRun(config(), Workload.replay(sessions(3)), faults, "mine")
    with pytest.raises(ConfigError, match="mine, fault 1: no 'prefill-9'"):
        Trial(3, faults, "mine")


def test_given_faults_happen_to_the_cluster_of_a_seed() -> None:
    faults = [
        Fault(at_s=0.1, kind="kill", target="decode-0"),
        Fault(at_s=9.0, kind="restart_gateway"),
    ]
    report = Trial(3, faults, "mine").run()
    assert report.failure is None, report.last_events
    assert report.faults == {"kill": 1, "restart_gateway": 1}


# ---------------------------------------------------------------- what single faults do


class DiskClock:
    """One simulated disk, asked directly."""

    def __init__(self) -> None:
        self.heap = EventHeap()
        self.medium = SimMedium()
        self.ended_s: list[float] = []
        layout = KvLayout(
            num_layers=5, block_tokens=10, kv_width=10, dtype="bfloat16", fingerprint="f"
        )
        assert layout.block_bytes == 1000
        config = SimDiskConfig(bytes_per_s=1e6, latency_s=0.01)
        self._disks = SimDisks(
            self.heap, config, [self.medium], [8], layout,
            lambda _: self.ended_s.append(self.heap.now()),
        )  # fmt: skip

    def read_s(self) -> float:
        """Return how long one read takes."""
        begun_s = self.heap.now()
        self._disks.read(0, [DiskBlock(b"none", 0, 0)])
        self.heap.run_until(begun_s + 100)
        return self.ended_s[-1] - begun_s


def test_a_slow_disk_takes_so_many_times_as_long() -> None:
    disk = DiskClock()
    assert disk.read_s() == pytest.approx(0.011)
    disk.medium.slowdown = 100.0
    assert disk.read_s() == pytest.approx(1.1)


def test_disks_mend_when_their_time_is_over() -> None:
    cluster = Cluster(specs(1, 1), ssd_blocks=50)
    world = cluster.world
    pool = next(w for w in world.workers.values() if w.spec.role is Role.KVSTORE)
    name, seen = pool.spec.worker_id, []
    faults = [
        Fault(at_s=1.0, kind="slow_disk", target=name, seconds=2.0, amount=50.0),
        Fault(at_s=5.0, kind="disk_error", target=name, seconds=2.0),
    ]
    Injector(world, lambda _: None, lambda: None).schedule(faults, world.heap.now())
    for _ in range(4):
        cluster.run(2.0)
        medium = pool.media[0]
        seen.append((medium.slowdown, medium.refuses_reads, medium.refuses_writes))
    fine = (1.0, False, False)
    assert seen == [(50.0, False, False), fine, (1.0, True, True), fine]


def test_a_clock_that_jumps_makes_its_machine_tick_at_once() -> None:
    cluster = Cluster(specs(1, 1))
    world = cluster.world
    process = world.workers["decode-0"].process
    assert process is not None
    cluster.run(3.0)
    behind_s = process.now()
    injector = Injector(world, lambda _: None, lambda: None)
    fault = Fault(at_s=0.5, kind="skew", target="decode-0", amount=30.0)
    injector.schedule([fault], world.heap.now())
    stream = world.submit(request("r", [1, 2, 3]))
    cluster.run(1.0)
    assert process.now() == pytest.approx(behind_s + 31.0)
    cluster.run(60.0)
    assert len(stream.finals) == 1
    cluster.check_integrity()
