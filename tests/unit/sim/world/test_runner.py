"""What stages send each other takes time, and each reports its layers as it computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake.base import KvLayout, PageArray, SamplingParams
from mooncake.engine.plan import LayerDone, StepPlan, StepResult, StepSlot
from mooncake.engine.ranks.step_log import UsePages
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.ranks import RankedRunner
from mooncake.sim.world.runner import SimRunner
from tests.support.engine.fake_runner import sequence_of

LAYOUT = KvLayout(
    num_layers=4, block_tokens=4, kv_width=8, dtype="float8_e4m3fn", fingerprint="stages"
)


class OneSecond:
    def seconds(self, plan: StepPlan) -> float:
        return 1.0


class Heard:
    """What a runner says."""

    def __init__(self, heap: EventHeap) -> None:
        self.heap = heap
        self.ended_s: list[float] = []
        self.layers: list[tuple[int, int, int]] = []
        """(second, step, layer)"""

    def __call__(self, event: msgspec.Struct) -> None:
        if isinstance(event, StepResult):
            self.ended_s.append(self.heap.now())
        elif isinstance(event, LayerDone):
            self.layers.append((round(self.heap.now()), event.step_id, event.layer))


def open_runner(num_ranks: int, send_s: Callable[[int], float]) -> tuple[SimRunner, Heard]:
    """Return a runner of four stages, of a layer and a second each, and what it says when."""
    heap = EventHeap()
    heard = Heard(heap)
    settings: dict[str, Any] = {"num_layers": 4, "num_stages": 4, "send_s": send_s}
    if num_ranks == 1:
        return SimRunner(heap, OneSecond(), heard, **settings), heard
    settings |= {"pages": UsePages(PageArray(LAYOUT, 8), None), "exchange_s": 60}
    return RankedRunner(heap, OneSecond(), heard, num_ranks=num_ranks, **settings), heard


def step(number: int, num_tokens: int, *, report_layers: bool = False) -> StepPlan:
    tokens = [1] * num_tokens
    start = sequence_of(1, SamplingParams(seed=5), tokens)
    slot = StepSlot(sequence_id=1, start=0, tokens=tokens, pages=[0, 1], sample=True)
    return StepPlan(
        step_id=number, starts=[] if number else [start], slots=[slot], ended=[],
        report_layers=report_layers,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_stages_send_the_rows_of_the_step(num_ranks: int, num_tokens: int) -> None:
    """A decode step of one row sends one row, whatever a chunk of a prompt may have."""
    runner, heard = open_runner(num_ranks, lambda tokens: 0.25 * tokens)
    runner.submit(step(0, num_tokens))
    heard.heap.run_until(120.0)
    assert heard.ended_s == [pytest.approx(4 + 3 * 0.25 * num_tokens, abs=0.01)]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_last_stage_tells_the_first_of_each_step(num_ranks: int) -> None:
    """By a small message, which costs nothing while the first stage is busy."""
    runner, heard = open_runner(num_ranks, lambda _: 0.25)
    runner.submit(step(0, 8))
    runner.submit(step(1, 8))
    heard.heap.run_until(120.0)
    assert heard.ended_s == [pytest.approx(4 + 4 * 0.25, abs=0.01), pytest.approx(6, abs=0.01)]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_each_stage_reports_its_layers_as_it_computes_them(num_ranks: int) -> None:
    """So those of the second step come before the first has ended."""
    runner, heard = open_runner(num_ranks, lambda _: 0.0)
    runner.submit(step(0, 8, report_layers=True))
    runner.submit(step(1, 8, report_layers=True))
    heard.heap.run_until(120.0)
    assert sorted(set(heard.layers)) == [
        (1, 0, 0), (2, 0, 1), (2, 1, 0), (3, 0, 2), (3, 1, 1), (4, 1, 2),
    ]  # fmt: skip
    assert heard.ended_s == [pytest.approx(4, abs=0.01), pytest.approx(5, abs=0.01)]
