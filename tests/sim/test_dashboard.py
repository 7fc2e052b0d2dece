"""The shipped dashboard drawn over a load that was recorded: a simulated cluster's gateway and pool
nodes are scraped while requests come, workers are lost and requests are refused. Every panel has
lines, and those that can be counted by hand are right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from mooncake.base import FinishReason, Role, WorkerLoad
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.host.families import render
from mooncake.launch.pool_node.metrics import node_families
from mooncake.launch.worker.metrics import link_families
from mooncake.sim import simulation as simulated
from mooncake.sim.measure import Measures
from mooncake.sim.results.plots import Line, lines_plot
from mooncake.sim.simulation import START_S, Simulation
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    Refused,
    WorkerJoined,
    WorkerReported,
)
from mooncake.telemetry.metrics import Metrics
from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkSnapshot
from tests.support.monitoring import panels
from tests.support.promql import Query, Recording
from tests.support.sim.traces import sessions, simulation

SCRAPE_S, STEP_S = 10.0, 20.0
VARIABLES = {"model": "k2", "__rate_interval": "1m"}
EXPERTS = {
    "Balance of the ranks",
    "Rows of the hottest expert",
    "Experts moved, workers waited for",
}


class Recorded:
    """A simulated load, and what was scraped meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = Metrics("k2")

        class Watched(Measures):
            def record(self, event: AnyEvent) -> None:
                super().record(event)
                metrics.record(event)

        monkeypatch.setattr(simulated, "Measures", Watched)
        self.recording = Recording()
        self.played = simulation(sessions(150, every_ms=1000.0))
        world = self.played.world

        def scrape() -> None:
            now = world.heap.now()
            fail(metrics, now)
            self.recording.add(metrics.render().decode(), now)
            for worker_id, worker in world.workers.items():
                if isinstance(worker.machine, KvNode):
                    self.recording.add(node_text(worker_id, worker.machine, self.played), now)
            world.heap.after(SCRAPE_S, scrape)

        world.heap.at(START_S, scrape)
        world.heap.at(START_S + 38.0, lambda: world.kill("prefill-1"))
        self.played.run()
        self.end_s = world.heap.now()

    def drawn(self, expression: str) -> dict[frozenset[tuple[str, str]], list[tuple[float, float]]]:
        """Return the points of each line that an expression has."""
        query, lines = Query(expression, VARIABLES), {}
        for step in range(1, int((self.end_s - START_S) / STEP_S) + 1):
            at_s = START_S + STEP_S * step
            for labels, value in query.at(self.recording, at_s).items():
                lines.setdefault(labels, []).append((at_s, value))
        return lines


def fail(metrics: Metrics, now: float) -> None:
    """Record a request that fails and one that is refused, which this load has not."""
    metrics.record(Refused(request_id="y", at_s=now, status=429, reason="ttft_limit"))
    metrics.record(Accepted(request_id="x", at_s=now, num_prompt_tokens=1, max_tokens=1))
    metrics.record(
        Finished(
            request_id="x", at_s=now, reason=FinishReason.ERROR, num_prompt_tokens=1,
            num_output_tokens=0, status=503,
        )
    )  # fmt: skip


def node_text(name: str, node: KvNode, played: Simulation) -> str:
    """Return what a pool node's /metrics says."""
    moved = played.world.network.num_bytes_moved
    link = LinkSnapshot(
        protocol="tcp", nic="", peer="p", num_bytes=moved, num_slices=moved // 1000, busy_s=1.0,
        num_retries=0, num_failures=0, latency_s=1.0,
        latency_buckets=[moved // 1000] * (len(LATENCY_BOUNDS_S) + 1),
    )  # fmt: skip
    return render([*node_families(node.state()), *link_families(name, [link])]).decode()


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Recorded(monkeypatch)


@pytest.mark.parametrize("panel", panels(), ids=[panel["title"] for panel in panels()])
def test_every_panel_has_lines(panel: dict[str, Any], recorded: Recorded) -> None:
    source = experts() if panel["title"] in EXPERTS else recorded
    for target in panel["targets"]:
        lines = source.drawn(target["expr"])
        assert lines, target["expr"]
        values = [value for points in lines.values() for _, value in points]
        assert all(value >= 0 for value in values if not math.isnan(value))
        assert any(math.isfinite(value) for value in values)
        times = sorted({at_s for points in lines.values() for at_s, _ in points})
        drawn = [
            Line(name=str(sorted(labels)), values=[dict(points).get(at_s, 0.0) for at_s in times])
            for labels, points in lines.items()
        ]
        assert lines_plot(times, drawn, "s", target["legendFormat"]).count("<polyline") == len(
            lines
        )


def test_what_is_drawn_is_what_happened(recorded: Recorded) -> None:
    expressions = {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels()
    }
    requests = recorded.played.measures.requests
    ended, _, refused = (recorded.drawn(each) for each in expressions["Requests by how they end"])
    by_reason = {dict(labels)["finished_reason"]: points for labels, points in ended.items()}
    number = sum(value * STEP_S for _, value in by_reason["stop"])
    assert number == pytest.approx(sum(each.completed for each in requests), rel=0.15)
    [points] = refused.values()
    assert [value for _, value in points] == pytest.approx([1 / SCRAPE_S] * len(points))
    first = recorded.drawn(expressions["Time to the first token"][2])
    [points] = first.values()
    slowest = max(each.ttft_s for each in requests if each.ttft_s is not None)
    assert all(value <= 2 * slowest for _, value in points)
    up, wanted = (recorded.drawn(each) for each in expressions["Workers up"])
    prefills = [value for _, value in up[frozenset({("role", "prefill")})]]
    assert (min(prefills), max(prefills)) == (1.0, 2.0), "one was killed, and came back"
    assert set(wanted) == {
        frozenset({("role", role.value)}) for role in (Role.PREFILL, Role.DECODE)
    }
    lost, *_ = (recorded.drawn(each) for each in expressions["Workers lost, attempts placed again"])
    assert max(value for _, value in lost[frozenset({("role", "prefill")})]) == 1.0


def experts() -> Recorded:
    """Return the record of a worker that shares experts, which no simulated counter has."""
    made = Recorded.__new__(Recorded)
    made.recording, made.end_s = Recording(), START_S + 120.0
    metrics = Metrics("k2")
    metrics.record(WorkerJoined(worker_id="d", at_s=0.0, role=Role.DECODE, num_blocks=8))
    for step in range(25):
        counters = {
            "expert_rows": 100.0 * step, "expert_rows_hottest": 25.0 * step,
            "expert_rank_rows_mean": 50.0 * step, "expert_rank_rows_most": 60.0 * step,
            "expert_moves": float(step), "expert_waited_for_s": 0.1 * step,
        }  # fmt: skip
        load = WorkerLoad(counters=counters)
        metrics.record(WorkerReported(worker_id="d", at_s=0.0, role=Role.DECODE, load=load))
        made.recording.add(metrics.render().decode(), START_S + SCRAPE_S * step)
    return made


def test_a_share_of_the_hottest_expert_is_read_off_as_it_was() -> None:
    [panel] = [panel for panel in panels() if panel["title"] == "Rows of the hottest expert"]
    [points] = experts().drawn(panel["targets"][0]["expr"]).values()
    assert [value for _, value in points] == pytest.approx([0.25] * len(points))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sum(rate(m_total[1m]))", 3.0),
        ("sum by (a) (increase(m_total[1m]))", 100.0),
        ('max(m_total{a=~"x|y",b!="z"})', 120.0),
        ("sum(rate(m_total[1m])) / sum(rate(m_total[1m]))", 1.0),
        ("histogram_quantile(0.5, sum by (le) (rate(h_bucket[1m])))", 1.5),
    ],
)
def test_the_evaluation_itself(expression: str, value: float) -> None:
    """Counters that grow by 10 and 20 each 10 s; half of the values between 1 and 2."""
    recording = Recording()
    for step in range(7):
        recording.add(
            f'# TYPE m counter\nm_total{{a="x"}} {10 * step}\nm_total{{a="y"}} {20 * step}\n'
            f'# TYPE h histogram\nh_bucket{{le="1"}} {0}\nh_bucket{{le="2"}} {4 * step}\n'
            f'h_bucket{{le="+Inf"}} {4 * step}\nh_count {4 * step}\nh_sum 1\n',
            10.0 * step + 0.5,
        )
    found = Query(expression, {}).at(recording, 61.0)
    assert max(found.values()) == pytest.approx(value)
