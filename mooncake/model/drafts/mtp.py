"""The model's MTP layer as a layer that drafts. Its KV is one more layer of the model's pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from mooncake.engine.plan import StepSlot
from mooncake.model.copies import Copies
from mooncake.model.inputs import PageTables, build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors


class MtpRows:
    """Computes rows of the MTP layer over the pages of an engine."""

    window = None

    def __init__(self, model: KimiK2, kv: KvTensors, copies: Copies) -> None:
        self._model = model
        self._kv = kv
        self._copies = copies
        self._tables = PageTables()
        self.reads = (model.spec.num_hidden_layers,)
        self.block_tokens = kv.page_shape[1]

    def states(self, read: torch.Tensor) -> torch.Tensor:
        """Return the model's states [rows, hidden] after its last norm."""
        return self._model.normed(read)

    def compute(self, slots: Sequence[StepSlot], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the KV of the slots' tokens; see `DraftLayer`."""
        model, kv = self._model, self._kv
        rule = model.prefers_absorbed
        # All rows, because a few rows in full are faster than the last of each.
        every = frozenset(slot.sequence_id for slot in slots if slot.sample)
        inputs = build_inputs(slots, every, kv.page_shape, rule, self._tables, kv.home)
        of = {slot.sequence_id: each for slot, each in zip(slots, states, strict=True)}
        joined = torch.cat([of[each.slot.sequence_id] for each in inputs.input_rows])
        made = model.guess(inputs.to(model.device), joined, kv)
        place = {
            each.slot.sequence_id: each.first + each.num_rows - 1 for each in inputs.output_rows
        }
        order = [place[slot.sequence_id] for slot in slots if slot.sample]
        if order == list(range(len(made))):
            return made
        return made.index_select(0, self._copies.send(torch.tensor(order)))

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens by the model's own head."""
        return self._model.likeliest(states)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Do nothing, because the engine owns the pages."""

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Do nothing, for the same reason."""
