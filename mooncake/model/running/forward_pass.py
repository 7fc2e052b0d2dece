"""One step's forward pass on any rank of an instance: replayed when the step is short, else run
eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.copies import Copies
from mooncake.model.device.graphs import DecodeGraphs, GraphPort
from mooncake.model.device.prefill_graphs import PrefillGraphs
from mooncake.model.inputs import PageTables, StepInputs, build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors


@dataclass(frozen=True)
class CapturedSteps:
    """The captured steps of one model over some pages."""

    decode: DecodeGraphs
    prompts: PrefillGraphs | None = None


def capture_steps(
    model: KimiK2, kv: KvTensors, port: GraphPort, sizes: CapturedSizes, copies: Copies | None
) -> CapturedSteps:
    """Capture steps of these sizes. All ranks call this at once. copies: see `DecodeGraphs`."""
    rows, pages, tokens = sizes.most_rows, sizes.most_pages, sizes.most_tokens
    with torch.inference_mode():
        decode = DecodeGraphs(model, kv, port, most_rows=rows, most_pages=pages, copies=copies)
        if not tokens:
            return CapturedSteps(decode)
        prompts = PrefillGraphs(
            model, kv, port,
            most_tokens=tokens, most_sequences=rows, most_pages=pages, copies=copies,
        )  # fmt: skip
        return CapturedSteps(decode, prompts)


class ForwardPass:
    """The passes of one model over some pages, in order."""

    def __init__(self, model: KimiK2, kv: KvTensors, captured: PrefillGraphs | None = None) -> None:
        """`captured`: short steps over the same pages; None: each step runs eagerly."""
        self._model = model
        self._kv = kv
        self._captured = captured
        self._tables = PageTables()

    def __call__(
        self,
        slots: Sequence[StepSlot],
        whole: frozenset[int],
        after_write: Callable[[int], None] | None = None,
        read: Callable[[int, torch.Tensor], None] | None = None,
    ) -> tuple[StepInputs, torch.Tensor]:
        """Return a step's inputs and the final hidden states of its output rows.

        whole: the sequences for which all rows are wanted. after_write, read: see `KimiK2.forward`.
        In a replayed step all layers are written before the last is reported.

        All ranks decide alike whether a step is replayed.
        """
        model, kv, captured = self._model, self._kv, self._captured
        model.between_steps()
        if captured is None or read is not None or not captured.takes(slots):
            rule = model.prefers_absorbed
            inputs = build_inputs(slots, whole, kv.page_shape, rule, self._tables, kv.home)
            return inputs, model.forward(inputs.to(model.device), kv, after_write, read)
        inputs = build_inputs(slots, whole, kv.page_shape, _absorbed, self._tables, kv.home)
        states = captured.states(inputs)
        if after_write is not None:
            after_write(model.stage.layers[-1])
        return inputs, states


def _absorbed(_new: int, _context: int) -> bool:
    return True
