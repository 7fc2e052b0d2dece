"""Drafts by a model's MTP layer, and the KV of that layer. Owns what is left to compute of it.

The row of place `i` is made of the token there and of the model's state at `i - 1`. So the last row
is that of the token which is computed next, and the rows of a block depend on no later block. They
are computed together when a draft is wanted, and before a block is full or handed on: from then on
they are final. Where the state before is not here (at the first place, and behind KV that came from
elsewhere) a row has zeros in its stead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from mooncake.engine.plan import StepSlot
from mooncake.model.copies import Copies
from mooncake.model.inputs import PageTables, SlotRows, build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors


@dataclass
class _Left:
    """The rows of a sequence that are not computed: those from place `first` on."""

    first: int
    states: list[torch.Tensor]
    """[rows, hidden]: those of the model at the places from `first - 1` on."""
    tokens: list[int] = field(default_factory=list)
    """At the places from `first` on: one fewer than states, or two where they came apart."""

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)


class MtpDrafts:
    """What the MTP layer has seen of every sequence."""

    def __init__(self, model: KimiK2, kv: KvTensors, copies: Copies) -> None:
        self._model = model
        self._kv = kv
        self._copies = copies
        self._tables = PageTables()
        self._left: dict[int, _Left] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that have ended, or begin anew."""
        for sequence_id in sequence_ids:
            self._left.pop(sequence_id, None)

    def make(self, slots: Sequence[StepSlot]) -> list[StepSlot]:
        """Return the slots of a step with the likeliest tokens for drafts: of further ones the
        layer's own states are the states before.
        """
        drafts: dict[int, list[int]] = {slot.sequence_id: [] for slot in slots}
        going = [slot for slot in slots if slot.num_drafts]
        rows, states = [], []
        for slot in going:
            left = self._left_of(slot)
            rows.append(_rows(slot, left.first, [*left.tokens, slot.tokens[0]]))
            states.append(self._model.normed(torch.cat(left.states)))
            self._left[slot.sequence_id] = _Left(slot.start + 1, [])
        while going:
            made = self._guess(rows, states)
            tokens = self._copies.fetch(self._model.likeliest(made)).wait().tolist()
            further: list[tuple[StepSlot, torch.Tensor]] = []
            for slot, state, token in zip(going, made[:, None], tokens, strict=True):
                drafts[slot.sequence_id].append(int(token))
                if len(drafts[slot.sequence_id]) < slot.num_drafts:
                    further.append((slot, state))
            going, states = [slot for slot, _ in further], [state for _, state in further]
            rows = [_next_row(slot, drafts[slot.sequence_id]) for slot in going]
        return [
            msgspec.structs.replace(slot, tokens=[slot.tokens[0], *drafts[slot.sequence_id]])
            if slot.num_drafts
            else slot
            for slot in slots
        ]

    def keep(
        self,
        step_rows: Sequence[SlotRows],
        hidden: torch.Tensor,
        num_samples: Mapping[int, int],
        *,
        handed_on: bool,
    ) -> bool:
        """Keep the states of a step; compute the rows that must be final by now, and return whether
        there were any.

        step_rows: of all slots, in `hidden`. num_samples: of each sequence that sampled. handed_on:
        all rows must be final.
        """
        rows, states = [], []
        block_tokens = self._kv.page_shape[1]
        for each in step_rows:
            slot = each.slot
            is_new = slot.sequence_id not in self._left
            left = self._left_of(slot)
            num_known = len(slot.tokens) - slot.num_drafts
            num_right = num_known + max(0, num_samples.get(slot.sequence_id, 0) - 1)
            left.tokens += slot.tokens[left.stop - slot.start : num_right]
            left.states.append(hidden[each.first : each.first + num_right].clone())
            is_full = left.stop // block_tokens > left.first // block_tokens
            if left.tokens and (handed_on or is_new or num_known > 1 or is_full):
                known = torch.cat(left.states)
                rows.append(_rows(slot, left.first, left.tokens, sample=False))
                states.append(self._model.normed(known[:-1]))
                self._left[slot.sequence_id] = _Left(left.stop, [known[-1:].clone()])
        if rows:
            self._guess(rows, states)
        return bool(rows)

    def _guess(self, slots: Sequence[StepSlot], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the layer's state of the last row of each slot that samples, in their order; each
        has its `states` before its tokens.
        """
        model, kv = self._model, self._kv
        rule = model.prefers_absorbed
        # All rows, as few rows of all are computed faster than the last of few.
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

    def _left_of(self, slot: StepSlot) -> _Left:
        left = self._left.get(slot.sequence_id)
        if left is None:
            model = self._model
            unknown = torch.zeros(1, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            left = self._left[slot.sequence_id] = _Left(slot.start, [unknown])
        return left


def _rows(slot: StepSlot, first: int, tokens: list[int], *, sample: bool = True) -> StepSlot:
    """Return rows of the sequence of `slot`, as a slot of their own."""
    return StepSlot(
        sequence_id=slot.sequence_id, start=first, tokens=tokens, pages=slot.pages, sample=sample
    )


def _next_row(slot: StepSlot, drafts: list[int]) -> StepSlot:
    return _rows(slot, slot.start + len(drafts), drafts[-1:])
