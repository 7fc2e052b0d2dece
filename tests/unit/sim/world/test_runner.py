"""What a step of several stages sends from one to the next takes as long as its tokens do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import KvLayout, PageArray, SamplingParams
from mooncake.engine.plan import SequenceStart, StepPlan, StepResult, StepSlot
from mooncake.engine.step_log import UsePages
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.ranks import RankedRunner
from mooncake.sim.world.runner import SimRunner

LAYOUT = KvLayout(
    num_layers=4, block_tokens=4, kv_width=8, dtype="float8_e4m3fn", fingerprint="stages"
)


class OneSecond:
    def seconds(self, plan: StepPlan) -> float:
        return 1.0


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_stages_send_the_rows_of_the_step(num_ranks: int, num_tokens: int) -> None:
    """A decode step of one row sends one row, whatever a chunk of a prompt may have."""
    heap, ended_s = EventHeap(), []

    def deliver(event: msgspec.Struct) -> None:
        if isinstance(event, StepResult):
            ended_s.append(heap.now())

    settings: dict[str, Any] = {
        "num_layers": 4, "num_stages": 4, "send_s": lambda tokens: 0.25 * tokens,
    }  # fmt: skip
    runner = SimRunner(heap, OneSecond(), deliver, **settings)
    if num_ranks > 1:
        pages = UsePages(PageArray(LAYOUT, 8), None)
        runner = RankedRunner(
            heap, OneSecond(), deliver, **settings, num_ranks=num_ranks, pages=pages, exchange_s=60
        )
    tokens = [1] * num_tokens
    start = SequenceStart(
        sequence_id=1, sampling=SamplingParams(seed=5), prompt_tokens=tokens, output_tokens=[]
    )
    slot = StepSlot(sequence_id=1, start=0, tokens=tokens, pages=[0, 1], sample=True)
    runner.submit(StepPlan(step_id=0, starts=[start], slots=[slot], ended=[]))
    heap.run_until(120.0)
    assert ended_s == [pytest.approx(4 + 3 * 0.25 * num_tokens, abs=0.01)]
