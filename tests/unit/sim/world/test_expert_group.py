"""Instances with experts in common: who has rows wakes the others, and all wait for the slowest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from mooncake.base import KvLayout, PageArray, SamplingParams
from mooncake.engine.plan import StepPlan, StepResult, StepSlot
from mooncake.engine.ranks.step_log import UsePages
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.expert_group import LINK_S, ExpertGroup
from mooncake.sim.world.ranks import RankedRunner, RanksLost
from tests.support.engine.fake_runner import sequence_of

LAYOUT = KvLayout(
    num_layers=3, block_tokens=4, kv_width=8, dtype="float8_e4m3fn", fingerprint="group"
)
EXCHANGE_S = 5.0


class OneSecondARow:
    def seconds(self, plan: StepPlan) -> float:
        return float(plan.num_tokens)


def step(step_id: int, num_tokens: int) -> StepPlan:
    """Return a step of one new sequence."""
    tokens = [1] * num_tokens
    start = sequence_of(step_id, SamplingParams(seed=5), tokens)
    slot = StepSlot(sequence_id=step_id, start=0, tokens=tokens, pages=[0, 1], sample=True)
    return StepPlan(step_id=step_id, starts=[start], slots=[slot], ended=[])


class Cluster:
    """Instances of two ranks each, in one group."""

    def __init__(self, num_instances: int, **settings: object) -> None:
        self.heap = EventHeap()
        self.results: list[tuple[int, float, int]] = []
        """(instance, time, step)"""
        self.lost: dict[int, str] = {}
        group = ExpertGroup(self.heap)
        self.instances = [self._instance(number, settings) for number in range(num_instances)]
        for instance in self.instances:
            instance.share_experts(group)

    def _instance(self, number: int, settings: dict[str, object]) -> RankedRunner:
        def deliver(event: msgspec.Struct) -> None:
            if isinstance(event, StepResult):
                self.results.append((number, self.heap.now(), event.step_id))
            elif isinstance(event, RanksLost):
                self.lost[number] = event.why

        return RankedRunner(
            self.heap, OneSecondARow(), deliver, num_layers=3, num_layer_reports=3, num_ranks=2,
            pages=UsePages(PageArray(LAYOUT, 8), None), exchange_s=EXCHANGE_S,
            **settings,  # type: ignore[arg-type]
        )  # fmt: skip


def test_one_without_rows_takes_part_and_tells_nobody() -> None:
    cluster = Cluster(3)
    cluster.instances[1].submit(step(7, 2))
    cluster.heap.run_until(60.0)
    [(number, at_s, step_id)] = cluster.results
    assert (number, step_id) == (1, 7)
    assert at_s == pytest.approx(2.0, abs=3 * LINK_S)
    assert not cluster.lost
    assert [instance.busy_s > 0 for instance in cluster.instances] == [False, True, False]


def test_all_wait_for_the_one_with_most_rows() -> None:
    cluster = Cluster(2)
    cluster.instances[0].submit(step(0, 1))
    cluster.instances[1].submit(step(1, 4))
    cluster.heap.run_until(60.0)
    assert [number for number, _, _ in cluster.results] == [0, 1]
    assert [at_s for _, at_s, _ in cluster.results] == pytest.approx([4.0, 4.0], abs=3 * LINK_S)


def test_a_step_that_comes_while_others_compute_is_in_the_next_one() -> None:
    cluster = Cluster(2)
    cluster.instances[0].submit(step(0, 3))
    cluster.heap.run_until(1.0)
    cluster.instances[1].submit(step(1, 2))
    cluster.heap.run_until(60.0)
    ends_s = [at_s for _, at_s, _ in cluster.results]
    assert ends_s == pytest.approx([3.0, 5.0], abs=6 * LINK_S)


def test_seconds_may_depend_on_the_rows_of_all() -> None:
    heard: list[tuple[int, list[int]]] = []

    def together_s(plan: StepPlan, others: Sequence[int]) -> float:
        heard.append((plan.num_tokens, list(others)))
        return 1.0

    cluster = Cluster(3, together_s=together_s)
    cluster.instances[0].submit(step(0, 1))
    cluster.instances[2].submit(step(1, 4))
    cluster.heap.run_until(60.0)
    assert heard == [(1, [0, 4]), (0, [1, 4]), (4, [1, 0])]


def test_one_that_stands_still_is_named_and_all_end() -> None:
    cluster = Cluster(2)
    for rank in range(2):
        cluster.instances[1].hang_rank(rank, 60.0)
    cluster.instances[0].submit(step(0, 1))
    cluster.heap.run_until(30.0)
    waited = "did not answer for 5 s"
    assert cluster.lost == {0: f"instance 1 of this expert group {waited}"}
    cluster.heap.run_until(90.0)
    assert cluster.lost[1] == "instance 0 of this expert group has ended", "when it goes on"
    assert not cluster.results
