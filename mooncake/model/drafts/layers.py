"""The layer that drafts for a model: an EAGLE-3 head, or the checkpoint's MTP layer. Every rank of
an engine opens its own, and all compute it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import Eagle3Files
from mooncake.model.copies import Copies
from mooncake.model.device.captured_rows import CapturedRows
from mooncake.model.device.graphs import GraphPort, most_rows
from mooncake.model.drafts.captured import CapturedGuesses
from mooncake.model.drafts.eagle3 import Eagle3Head, Eagle3Rows
from mooncake.model.drafts.model_drafts import DraftLayer, ModelDrafts, last_rows
from mooncake.model.inputs import PageTables, build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors


def load_head(path: str | None, model: KimiK2, backends: Backends) -> Eagle3Head | None:
    """Return the EAGLE-3 head in the directory `path`, or None if there is none, or ranks of a
    later stage have it.

    Raises:
        CheckpointError: it is not complete, or the head of another model.
    """
    if path is None or not model.stage.is_last:
        return None
    return Eagle3Head(Eagle3Files.open(Path(path), model.spec), model, backends)


def layers_read(model: KimiK2, head: Eagle3Head | None, num_sequences: int) -> tuple[int, ...]:
    """Return what the layer that drafts will read (see `DraftLayer`); nothing: there is none. The
    rest: see `draft_layer`.
    """
    if head is not None and num_sequences:
        return head.spec.layers
    return () if model.mtp is None else (model.spec.num_hidden_layers,)


def draft_layer(
    model: KimiK2, head: Eagle3Head | None, kv: KvTensors, num_sequences: int, copies: Copies
) -> DraftLayer | None:
    """Return the layer that drafts over these pages, if this rank has one.

    num_sequences: the most sequences whose KV a head keeps; 0: the head is not used.
    """
    if head is not None and num_sequences:
        return Eagle3Rows(head, num_sequences, copies)
    return None if model.mtp is None else MtpRows(model, kv, copies)


def drafts_over(
    model: KimiK2, head: Eagle3Head | None, num_sequences: int, copies: Copies
) -> Callable[[KvTensors], ModelDrafts | None]:
    """Return what opens the drafts over some pages that the ranks of this stage make together, if
    they make any. The rest: see `draft_layer`.
    """

    def opened(kv: KvTensors) -> ModelDrafts | None:
        layer = draft_layer(model, head, kv, num_sequences, copies)
        return None if layer is None else ModelDrafts(layer, copies, model.stage.ranks)

    return opened


class MtpRows:
    """Computes rows of the MTP layer over the pages of an engine."""

    window = None

    def __init__(self, model: KimiK2, kv: KvTensors, copies: Copies) -> None:
        self._model = model
        self._kv = kv
        self._copies = copies
        self._tables = PageTables()
        self._captured: tuple[CapturedRows, CapturedGuesses] | None = None
        self.reads = layers_read(model, None, 0)
        self.block_tokens = kv.page_shape[1]

    def states(self, read: torch.Tensor) -> torch.Tensor:
        """Return the model's states [rows, hidden] after its last norm."""
        return self._model.normed(read)

    def capture(self, port: GraphPort, sizes: CapturedSizes) -> None:
        """Have rows from now on computed by captured steps where they fit into these."""
        model, kv = self._model, self._kv
        num_rows = most_rows(sizes.most_rows, sizes.most_drafts)
        rows = CapturedRows(
            kv, model.device, self._copies,
            most_rows=num_rows, most_pages=sizes.most_pages,
            most_of_slot=2 * (1 + sizes.most_drafts),  # of a step with drafts and one without
        )  # fmt: skip

        def guess(
            size: int, states: torch.Tensor, last: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            made = model.guess(rows.inputs(size), states, kv).index_select(0, last)
            return made, model.likeliest(made)

        hidden = model.spec.hidden_size
        states = torch.zeros(num_rows, hidden, dtype=model.dtype, device=model.device)
        guesses = CapturedGuesses(port, self._copies, guess, states, sizes.most_rows)
        self._captured = rows, guesses

    def compute(
        self, slots: Sequence[StepSlot], states: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the slots' tokens; see `DraftLayer`."""
        if self._captured is None or not self._captured[0].takes(slots):
            return self._compute(slots, states, tokens)
        rows, guesses = self._captured
        size = guesses.size_for(len(states))
        rows.fill(rows.of(slots), size, tokens)
        return guesses.replay(size, states, last_rows(slots))

    def _compute(
        self, slots: Sequence[StepSlot], states: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same without a captured step."""
        model, kv = self._model, self._kv
        rule = model.prefers_absorbed
        # All rows, because a few rows in full are faster than the last of each.
        every = frozenset(slot.sequence_id for slot in slots if slot.sample)
        inputs = build_inputs(slots, every, kv.page_shape, rule, self._tables, kv.home)
        inputs = inputs.to(model.device)
        if tokens is not None:  # a row each: these stay in their order
            inputs = replace(inputs, tokens=tokens)
        parts = torch.split(states, [len(slot.tokens) for slot in slots])
        of = {slot.sequence_id: part for slot, part in zip(slots, parts, strict=True)}
        joined = torch.cat([of[each.slot.sequence_id] for each in inputs.input_rows])
        made = model.guess(inputs, joined, kv)
        place = {
            each.slot.sequence_id: each.first + each.num_rows - 1 for each in inputs.output_rows
        }
        order = [place[slot.sequence_id] for slot in slots if slot.sample]
        if order != list(range(len(made))):
            made = made.index_select(0, self._copies.send(torch.tensor(order)))
        return made, model.likeliest(made) if order else torch.empty(0, dtype=torch.int64)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Do nothing, because the engine owns the pages."""

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Do nothing, for the same reason."""
