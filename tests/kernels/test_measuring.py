"""No step of an engine takes more memory than what was measured before pages were allocated: of a
rank of Kimi-K2 whose tensors have shapes and no numbers, so that allocations are counted and no
kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mooncake.base import KvLayout
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import Measure
from mooncake.model.compiling import META
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.measuring import largest_steps, measure_memory
from mooncake.model.memory import GpuMemory
from tests.support.kernels.launch_notes import noted_launches
from tests.support.kernels.step_launches import model_of
from tests.support.model.tiny_models import slot

PAGE, TOKENS, SEQUENCES, CONTEXT = 64, 2048, 64, 131_072
DECODES = [(1, CONTEXT - 1)] * (SEQUENCES - 1)
STEPS: dict[str, list[tuple[int, int]]] = {
    "a prompt": [(TOKENS, 0)],
    "the end of the longest prompt": [(TOKENS, CONTEXT - TOKENS)],
    "decodes": [*DECODES, (1, 99)],
    "decodes beside a chunk of 171": [*DECODES, (171, CONTEXT - 171)],
    "decodes beside a short chunk": [*DECODES, (60, 9000)],
    "decodes beside the largest chunk": [*DECODES, (TOKENS - SEQUENCES + 1, 100_000)],
    "drafts": [(8, 50_000)] * SEQUENCES,
    "several prompts": [(256, 0)] * 8,
    "chunks of several long prompts": [(512, 60_000)] * 4,
    "many short prompts": [(32, 0)] * SEQUENCES,
}
"""(new tokens, tokens before them) of each sequence."""


class Peak(TorchDispatchMode):
    """The most bytes of tensors of the device that were alive at once, made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor) and each.device == META:
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return made


class PeakMeter:
    """A `MemoryMeter` of what is not there."""

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        with Peak() as peak:
            step()
        return GpuMemory(total_bytes=0, resident_bytes=0, step_bytes=peak.bytes)


def taken(model: KimiK2, kv: KvTensors, rows: list[tuple[int, int]]) -> int:
    """Return the bytes that a step takes."""
    slots = [
        slot(number, before, [1] * new, [0] * -(-(before + new) // PAGE))
        for number, (new, before) in enumerate(rows)
    ]

    def step() -> None:
        inputs = build_inputs(slots, frozenset(), kv.page_shape, model.prefers_absorbed)
        model.logits(model.forward(inputs.to(META), kv))

    with torch.inference_mode():
        return PeakMeter().measure(step).step_bytes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_no_step_takes_more_than_was_measured(num_ranks: int, deterministic: bool) -> None:
    model = model_of("int4", 2, 1, num_ranks=num_ranks, deterministic=deterministic)
    layout = KvLayout.for_model(
        model.spec, block_tokens=PAGE, dtype="bfloat16", weights_revision="none"
    )
    kv = KvTensors.allocate(layout, CONTEXT // PAGE, META)
    asked = Measure(layout, 1, TOKENS, SEQUENCES, CONTEXT)
    with noted_launches():
        [found] = measure_memory(model, PeakMeter(), asked)
        steps = {name: taken(model, kv, rows) for name, rows in STEPS.items()}
    assert min(steps.values()) > 0
    assert {name: each for name, each in steps.items() if each > found.step_bytes} == {}
    assert found.resident_bytes == -layout.slice_bytes * (CONTEXT // PAGE), "its pages are free"


def test_one_row_and_many_rows_share_a_measured_step() -> None:
    layout = KvLayout(num_layers=2, block_tokens=PAGE, kv_width=576, dtype="bfloat16",
                      fingerprint="none")  # fmt: skip
    steps = largest_steps(Measure(layout, 2, TOKENS, SEQUENCES, CONTEXT))

    def shape(slots: list[StepSlot]) -> list[int]:
        return [len(each.tokens) for each in slots]

    assert [1] * (SEQUENCES - 1) + [TOKENS - SEQUENCES + 1] in map(shape, steps)
    assert [1] * (SEQUENCES - 1) + [128] in map(shape, steps)
    assert all(sum(shape(slots)) <= TOKENS for slots in steps)
    for slots in steps:
        for each in slots:
            assert each.start + len(each.tokens) == CONTEXT
            assert sorted(each.pages) == list(range(CONTEXT // PAGE)), "pages of both homes"
    few = largest_steps(Measure(layout, 1, 4, 4, 2))
    assert [shape(slots) for slots in few] == [[4], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
