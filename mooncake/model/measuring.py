"""The memory that is left for KV pages, measured by all ranks of an instance together: the largest
step is run once, so that libraries and exchanges have what they keep, and measured the second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mooncake.base.kv_layout import Home
from mooncake.engine.plan import StepSlot
from mooncake.engine.step_log import Measure
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.memory import GpuMemory
from mooncake.model.parallel.group import Group


class MemoryMeter(Protocol):
    """Measures the memory of a device."""

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        """Return what is in use now, and what `step` takes on top while it runs."""


def measure_memory(
    model: KimiK2, meter: MemoryMeter, asked: Measure, group: Group | None = None
) -> list[GpuMemory]:
    """Return the memory of each rank, in their order. All ranks call this at once.

    The step's tokens are one prompt, over pages of its own, of the layers of each rank's stage,
    which count as free; logits are those of as many rows as there may be sequences.

    Raises:
        GroupError: another rank was lost.
    """
    layout, num_homes = asked.layout, asked.num_homes
    home = Home(0 if group is None else group.rank % num_homes, num_homes)
    num_pages = layout.num_blocks(asked.step_tokens)
    slot = StepSlot(
        sequence_id=0, start=0, tokens=[0] * asked.step_tokens, pages=list(range(num_pages)),
        sample=True,
    )  # fmt: skip
    with torch.inference_mode():
        whole = model.stage.is_first and model.stage.is_last
        layers = range(layout.num_layers) if whole else model.stage.layers
        kv = KvTensors.allocate(layout, num_pages, model.device, home, layers)
        rule = model.prefers_absorbed

        def step() -> None:
            inputs = build_inputs([slot], frozenset([0]), kv.page_shape, rule, home=home)
            hidden = model.forward(inputs.to(model.device), kv)
            if model.stage.is_last:
                model.logits(hidden[: asked.step_sequences])

        step()
        found = meter.measure(step)
        mine = torch.tensor(
            [
                found.total_bytes,
                found.resident_bytes - kv.pages.nbytes,
                found.step_bytes,
            ],
            device=model.device,
        )
        everyone = mine if group is None else group.gather(mine)
    return [GpuMemory(*each) for each in everyone.view(-1, 3).tolist()]
