"""Engines on the cores of one machine."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from benchmarks.support.shared_cores import SharedCores, SharedRunner
from mooncake.base import SamplingParams
from mooncake.engine.plan import LayerDone, StepPlan, StepResult, StepSlot
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.runner import sampled_token
from tests.support.engine.fake_runner import sequence_of


class OneSecond:
    def seconds(self, plan: StepPlan) -> float:
        del plan
        return 1.0


def step(step_id: int, *, report_layers: bool = False) -> StepPlan:
    start = sequence_of(step_id, SamplingParams(seed=5), [1])
    slot = StepSlot(sequence_id=step_id, start=0, tokens=[1], pages=[0], sample=True)
    return StepPlan(
        step_id=step_id, starts=[start], slots=[slot], ended=[], report_layers=report_layers
    )


class Machine:
    """Runners on one machine, and what they say with its time."""

    def __init__(self, num_runners: int, num_cores: int, crowding: float = 1.0) -> None:
        self.heap = EventHeap()
        self.heard: list[tuple[int, float, msgspec.Struct]] = []
        cores = SharedCores(self.heap, num_cores, crowding)
        self.runners = [
            SharedRunner(self.heap, OneSecond(), self._hears(number), cores, num_layers=4)
            for number in range(num_runners)
        ]

    def _hears(self, number: int) -> Callable[[msgspec.Struct], None]:
        return lambda event: self.heard.append((number, self.heap.now(), event))

    def ends_s(self) -> dict[int, float]:
        return {number: at for number, at, event in self.heard if isinstance(event, StepResult)}


def test_alone_and_on_cores_of_their_own_steps_last_as_long_as_they_cost() -> None:
    machine = Machine(2, num_cores=2)
    machine.runners[0].submit(step(1))
    machine.heap.at(0.5, lambda: machine.runners[1].submit(step(1)))
    machine.heap.run_until(9)
    assert machine.ends_s() == pytest.approx({0: 1.0, 1: 1.5})


def test_three_on_two_cores_get_two_thirds_each() -> None:
    machine = Machine(3, num_cores=2)
    for runner in machine.runners:
        runner.submit(step(1))
    machine.heap.run_until(9)
    assert machine.ends_s() == pytest.approx({0: 1.5, 1: 1.5, 2: 1.5})


def test_crowding_counts_only_while_another_runner_is_at_work() -> None:
    machine = Machine(2, num_cores=2, crowding=2.0)
    machine.runners[0].submit(step(1))
    machine.heap.at(0.5, lambda: machine.runners[1].submit(step(1)))
    machine.heap.run_until(9)
    # Half alone, half at half the speed; then the other has half of its work left, alone.
    assert machine.ends_s() == pytest.approx({0: 1.5, 1: 2.0})
    assert machine.runners[0].busy_s == pytest.approx(1.5)


def test_layers_are_told_of_on_the_way_and_steps_wait_for_each_other() -> None:
    machine = Machine(1, num_cores=1)
    machine.runners[0].submit(step(1, report_layers=True))
    machine.runners[0].submit(step(2))
    machine.heap.run_until(9)
    layers = [(event.layer, at) for _, at, event in machine.heard if isinstance(event, LayerDone)]
    assert layers == [(0, 0.25), (1, 0.5), (2, 0.75)]
    ends = [(event, at) for _, at, event in machine.heard if isinstance(event, StepResult)]
    assert [(event.step_id, at) for event, at in ends] == [(1, 1.0), (2, 2.0)]
    [[token]] = ends[0][0].tokens.values()
    assert token == sampled_token(SamplingParams(seed=5), 0)
