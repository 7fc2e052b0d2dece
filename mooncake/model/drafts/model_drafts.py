"""Drafts by a layer that guesses tokens from the model's states. Owns the states of what that layer
has not computed yet.

The layer's row of place `i` is made of the token there and of the model's state at `i - 1`. So the
last row of a sequence is that of the token which is computed next; of further drafts the layer's
own states are the states before. Rows are computed together when a draft is wanted, and before
they must be final. All ranks of a model make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from mooncake.engine.plan import Sample, StepSlot
from mooncake.model.copies import Copies
from mooncake.model.inputs import SlotRows
from mooncake.model.parallel.group import Group, Solo

_MOST_LEFT = 16
"""Rows that a layer with a window leaves for later: their states take memory."""


class DraftLayer(Protocol):
    """A layer that guesses tokens, and its KV."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers of the model into which the states go that this one is made of, side by side;
        as many as there are layers: out of the last one.
        """

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a block, where the layer's KV lies in those of the model; None: elsewhere."""

    @property
    def window(self) -> int | None:
        """Rows before one that it need not see; None: it sees all."""

    def states(self, read: torch.Tensor) -> torch.Tensor:
        """Return the states that the layer takes, of those of the model, [rows, read width]."""

    def compute(self, slots: Sequence[StepSlot], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the KV of the slots' tokens, each of which has a state before it, and return the
        layer's states of the last one of each slot that samples, in their order.
        """

    def likeliest(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token after each of the layer's states, int64 [rows]."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that have ended, or begin anew."""

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError where it holds memory of others than these sequences."""


class ReadStates:
    """The states of one step that a layer reads; a forward pass shows all of them."""

    def __init__(self, reads: tuple[int, ...], num_layers: int) -> None:
        self._reads = reads
        self._num_layers = num_layers
        self._found: list[torch.Tensor] = []

    def __call__(self, layer: int, states: torch.Tensor) -> None:
        """Keep what goes into `layer`, which may be overwritten afterwards, if it is read."""
        if layer in self._reads:
            self._found.append(states if layer == self._num_layers else states.clone())

    @property
    def rows(self) -> torch.Tensor:
        """[rows, read width], in the order of the step's."""
        return self._found[0] if len(self._found) == 1 else torch.cat(self._found, dim=-1)


@dataclass
class _Left:
    """The rows of a sequence that are not computed: those from place `first` on."""

    first: int
    states: list[torch.Tensor]
    """[rows, read width]: those of the model at the places from `first - 1` on."""
    tokens: list[int] = field(default_factory=list)
    """At the places from `first` on: one fewer than states."""

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def drop(self, count: int) -> None:
        """Leave out the first `count` rows."""
        self.first += count
        del self.tokens[:count]
        while count >= len(self.states[0]):
            count -= len(self.states.pop(0))
        self.states[0] = self.states[0][count:]


class ModelDrafts:
    """What a layer that drafts has seen of every sequence.

    Where a sequence begins behind KV from elsewhere, the state before is not here. The layer's rows
    in its blocks go on with the next place: the first one's lies in the block that came, as its
    token was sampled where the block was computed. A block that begins there begins with a row
    of zeros for a state, and so does a sequence. Guesses get worse, answers do not change.
    """

    def __init__(
        self, layer: DraftLayer, num_layers: int, copies: Copies, group: Group | None = None
    ) -> None:
        """num_layers: of the model. group: the ranks that compute the layer, all of them alike."""
        self._layer = layer
        self._num_layers = num_layers
        self._copies = copies
        self._group = group or Solo()
        self._left: dict[int, _Left] = {}

    @property
    def reads_all_outputs(self) -> bool:
        """Whether the last layer must compute all rows."""
        return self._num_layers in self._layer.reads

    def read_states(self) -> ReadStates:
        """Return what is to see the states of a step."""
        return ReadStates(self._layer.reads, self._num_layers)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that have ended, or begin anew."""
        gone = list(sequence_ids)
        for sequence_id in gone:
            self._left.pop(sequence_id, None)
        self._layer.forget(gone)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError where something is held for others than these sequences."""
        others = self._left.keys() - set(sequences)
        assert not others, f"states of sequences that have ended: {sorted(others)}"
        self._layer.check_integrity(sequences)

    def make(self, slots: Sequence[StepSlot]) -> list[StepSlot]:
        """Return the slots of a step with the likeliest tokens for drafts. A sequence that gets
        some was in a step before.
        """
        drafts: dict[int, list[int]] = {slot.sequence_id: [] for slot in slots}
        going = [slot for slot in slots if slot.num_drafts]
        rows, read = [], []
        for slot in going:
            left = self._left[slot.sequence_id]
            rows.append(_rows(slot, left.first, [*left.tokens, slot.tokens[0]]))
            read.append(torch.cat(left.states))
            self._left[slot.sequence_id] = _Left(slot.start + 1, [])
        states = self._states(read)
        while going:
            made = self._layer.compute(rows, states)
            tokens = self._copies.fetch(self._layer.likeliest(made)).wait().tolist()
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
        read: ReadStates,
        samples: Sequence[Sample] | None,
        *,
        handed_on: bool,
    ) -> bool:
        """Keep the states of a step; compute the rows that must be final by now, and return whether
        there were any.

        step_rows: of all slots, in `read`. samples: of the step; None: another rank has them.
        handed_on: blocks go to other engines, with the row of the token just sampled where there
        is room for it.
        """
        sampled = self._sampled([each.slot for each in step_rows], samples)
        every, block_tokens = read.rows, self._layer.block_tokens
        rows, states = [], []
        for each in step_rows:
            slot = each.slot
            made = sampled.get(slot.sequence_id, [])
            left = self._add(each, every, len(made))
            room = 0 if block_tokens is None else len(slot.pages) * block_tokens
            final = handed_on and block_tokens is not None
            tokens = left.tokens + (made[-1:] if final and left.stop < room else [])
            prompt = len(slot.tokens) - slot.num_drafts > 1
            if tokens and (final or prompt or self._is_due(left)):
                known = torch.cat(left.states)
                rows.append(_rows(slot, left.first, tokens, sample=False))
                states.append(known[: len(tokens)])
                self._left[slot.sequence_id] = _Left(left.stop, [known[-1:].clone()])
        if rows:
            self._layer.compute(rows, self._states(states))
        return bool(rows)

    def _add(self, rows: SlotRows, every: torch.Tensor, num_samples: int) -> _Left:
        """Add what a step has computed of a sequence to what is left of it."""
        slot, block_tokens = rows.slot, self._layer.block_tokens
        left = self._left.get(slot.sequence_id)
        if left is None:
            left = _Left(slot.start + 1, [])
            if block_tokens is not None and slot.start % block_tokens == 0:
                left = _Left(slot.start, [torch.zeros_like(every[:1])])
            self._left[slot.sequence_id] = left
        num_right = len(slot.tokens) - slot.num_drafts + max(0, num_samples - 1)
        left.tokens += slot.tokens[left.stop - slot.start : num_right]
        left.states.append(every[rows.first : rows.first + num_right])
        window = self._layer.window
        if window is not None and len(left.tokens) > window:
            left.drop(len(left.tokens) - window)
        left.states[-1] = left.states[-1].clone()  # the rest of the step is not kept
        return left

    def _is_due(self, left: _Left) -> bool:
        block_tokens = self._layer.block_tokens
        if block_tokens is None:
            return len(left.tokens) >= _MOST_LEFT
        return left.stop // block_tokens > left.first // block_tokens

    def _states(self, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states that the layer takes, made of all together."""
        if not read:
            return []
        made = self._layer.states(torch.cat(list(read)))
        return list(torch.split(made, [len(each) for each in read]))

    def _sampled(
        self, slots: Sequence[StepSlot], samples: Sequence[Sample] | None
    ) -> dict[int, list[int]]:
        """Return the tokens that each sequence has sampled; the lead tells all ranks."""
        made: dict[int, list[int]] = {}
        for sample in samples or ():
            made.setdefault(sample.sequence_id, []).append(sample.token)
        if self._group.size == 1:
            return made
        width = 1 + max(slot.num_drafts for slot in slots)
        padded = [made.get(slot.sequence_id, []) for slot in slots]
        mine = torch.tensor([token for row in padded for token in [*row, *[-1] * width][:width]])
        told = self._group.gather(self._copies.send(mine))[: len(mine)]
        found = self._copies.fetch(told).wait().view(-1, width).tolist()
        return {
            slot.sequence_id: [token for token in row if token >= 0]
            for slot, row in zip(slots, found, strict=True)
        }


def _rows(slot: StepSlot, first: int, tokens: list[int], *, sample: bool = True) -> StepSlot:
    """Return rows of the sequence of `slot`, as a slot of their own."""
    return StepSlot(
        sequence_id=slot.sequence_id, start=first, tokens=tokens, pages=slot.pages, sample=sample
    )


def _next_row(slot: StepSlot, drafts: list[int]) -> StepSlot:
    return _rows(slot, slot.start + len(drafts), drafts[-1:])
