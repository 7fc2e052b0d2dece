"""Short steps with prompts over fixed buffers: one captured graph for each number of rows of a
ladder. An eager step of a few hundred rows ends when the host has launched its last kernel; a
replayed one ends when the device has computed it.

All rows attend in the absorbed form, whose kernels take lengths, tables and the bounds of sequences
from the device. So one graph serves any mix of prompts, chunks and decoding sequences. Its unused
rows have no KV place and belong to no sequence. Logits are not part of the graph, because only the
host knows for how many rows they are wanted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch
from mooncake_kernels.reference.paged_batch import PagedBatch

from mooncake.engine.plan import StepSlot
from mooncake.model.copies import Copies, HostCopies
from mooncake.model.device.graphs import GraphPort, Replay
from mooncake.model.inputs import Queries, StepInputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.mla import flops_of_forms

MOST_TOKENS = 256
"""The rows of the largest captured step. Larger steps take the device longer than the host."""
_SIZES = (16, 32, 48, 64, 96, 128, 192)
MORE_FLOPS = 8e11
"""How much more than the cheaper form the absorbed form of attention may take, over all layers and
this rank's heads: 2 ms at 400 TFLOP/s, less than the host takes to launch a step.
"""

_TOKENS, _POSITIONS, _PLACES = range(3)
_STARTS, _LENGTHS = range(2)
_ALIGNED = 4
"""Rows of a tensor are padded to this many int32 numbers, so that each begins at an
aligned place.
"""


class PrefillGraphs:
    """Final hidden states of steps of up to `most_tokens` rows."""

    def __init__(
        self,
        model: KimiK2,
        kv: KvTensors,
        port: GraphPort,
        *,
        most_tokens: int,
        most_sequences: int,
        most_pages: int,
        copies: Copies | None = None,
    ) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory.

        most_pages: the most pages in a sequence's table. copies: to the model's device; None: the
        model is on the host.
        """
        assert kv.home.num_homes == 1, "where ranks share contexts out, prompts are gathered"
        self._model = model
        self._kv = kv
        self._copies = copies or HostCopies()
        device, sequences = model.device, min(most_sequences, most_tokens)
        self._values = torch.zeros(3, most_tokens, dtype=torch.int64, device=device)
        self._values[_PLACES] = -1
        width = -(-(sequences + 1) // _ALIGNED) * _ALIGNED
        self._bounds = torch.zeros(2, width, dtype=torch.int32, device=device)
        self._table = torch.zeros(sequences, most_pages, dtype=torch.int32, device=device)
        forms, spec = flops_of_forms(model.spec), model.spec
        heads = spec.num_attention_heads // model.stage.ranks.size * spec.num_hidden_layers

        def more_flops(new: int, context: int) -> float:
            absorbed, expanded = forms(new, context)
            return heads * max(0.0, absorbed - expanded)

        self._more_flops = more_flops
        self._sizes = (*(size for size in _SIZES if size < most_tokens), most_tokens)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):
            self._replays[size] = port.capture(self._step(size))

    def takes(self, slots: Sequence[StepSlot]) -> bool:
        """Whether a step of these slots can be replayed, and is faster that way."""
        num_rows = sum(len(slot.tokens) for slot in slots)
        sequences, most_pages = self._table.shape
        if not 0 < num_rows <= self._sizes[-1] or len(slots) > sequences:
            return False
        if any(len(slot.pages) > most_pages for slot in slots):
            return False
        news = ((len(slot.tokens), slot.start + len(slot.tokens)) for slot in slots)
        return sum(self._more_flops(new, context) for new, context in news) <= MORE_FLOPS

    def states(self, inputs: StepInputs) -> torch.Tensor:
        """Return the final hidden states of the output rows, [rows, hidden], as `KimiK2.forward`
        does. The next call may overwrite them. This waits for no device.

        inputs: on the host, with all rows in the absorbed form, of a step that `takes` allows.
        """
        batch, num_rows = inputs.queries.span_batch, len(inputs.tokens)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        values = torch.zeros(3, size, dtype=torch.int64)
        values[_PLACES] = -1
        values[:, :num_rows] = torch.stack((inputs.tokens, inputs.positions, inputs.places))
        count, width = batch.page_table.shape
        bounds = torch.zeros(self._bounds.shape, dtype=torch.int32)
        bounds[_STARTS] = num_rows  # unused sequences end where they begin
        bounds[_STARTS, : count + 1] = batch.row_start
        bounds[_LENGTHS, :count] = batch.lengths
        self._values[:, :size].copy_(self._copies.send(values))
        self._bounds.copy_(self._copies.send(bounds))
        self._table[:count, :width].copy_(self._copies.send(batch.page_table))
        states = self._replays[size]()
        rows = inputs.outputs.rows
        if rows is None:
            return states[:num_rows]
        return states.index_select(0, self._copies.send(rows))

    def _step(self, size: int) -> Callable[[], torch.Tensor]:
        values, sequences = self._values, self._table.shape[0]
        starts, lengths = self._bounds[_STARTS, : sequences + 1], self._bounds[_LENGTHS, :sequences]

        def step() -> torch.Tensor:
            batch = PagedBatch(starts, lengths, self._table, max_rows=size)
            positions = values[_POSITIONS, :size]
            queries = Queries(positions, None, (), (), size, batch)
            inputs = StepInputs(
                values[_TOKENS, :size], positions, values[_PLACES, :size], queries, queries, ()
            )
            return self._model.forward(inputs, self._kv)

        return step
