"""Drafts by a layer that guesses tokens from the model's states. Owns the states that the layer has
not used yet.

The layer's row of place `i` is made of the token there and of the model's state at `i - 1`. So the
last row of a sequence belongs to the token that is computed next. For further drafts, the layer's
own states take the place of the model's. Rows are computed together when a draft is wanted, and
before they must be final. All ranks of a model make the same calls in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.copies import Copies
from mooncake.model.device.graphs import GraphPort
from mooncake.model.inputs import SlotRows
from mooncake.model.parallel.group import Group, Solo

_MOST_LEFT = 16
"""How many rows a layer with a window may leave for later. There is a limit because their states
take memory.
"""


class DraftLayer(Protocol):
    """A layer that guesses tokens, and its KV."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers of the model whose inputs make this layer's state, side by side. The number of
        layers stands for the output of the last one.
        """

    @property
    def block_tokens(self) -> int | None:
        """The tokens of a block, when the layer's KV lies in the model's blocks, or None if it lies
        elsewhere.
        """

    @property
    def window(self) -> int | None:
        """How many rows before itself a row needs to see, or None if it needs all of them."""

    def states(self, read: torch.Tensor) -> torch.Tensor:
        """Return the states that the layer takes, from the model's states [rows, read width]."""

    def capture(self, port: GraphPort, sizes: CapturedSizes) -> None:
        """Have short steps of the layer captured from now on. All its ranks call this at once."""

    def compute(
        self, slots: Sequence[StepSlot], states: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of the slots' tokens, and wait for no device. Return the layer's state of
        the last token of each slot that samples, in their order, and the likeliest token after it,
        int64. The next call may overwrite the states.

        states: [rows, hidden], the one before each token. tokens: [rows] int64 on the device, in
        place of those of the slots, which have one each.
        """

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that have ended, or begin anew."""

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError if the layer holds memory of other sequences than these."""


@dataclass
class _Left:
    """The rows of a sequence that are not computed yet: those from place `first` on."""

    first: int
    states: list[torch.Tensor]
    """[rows, read width]: the model's states at the places from `first - 1` on."""
    tokens: list[int] = field(default_factory=list)
    """The tokens at the places from `first` on; one fewer than the states."""

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    def drop(self, count: int) -> None:
        """Remove the first `count` rows."""
        self.first += count
        del self.tokens[:count]
        while count >= len(self.states[0]):
            count -= len(self.states.pop(0))
        self.states[0] = self.states[0][count:]


class ModelDrafts:
    """What a layer that drafts has seen of every sequence.

    When a sequence begins after KV from elsewhere, the state before it is not here. The layer's
    rows in its blocks then begin at the next place. The row of the first place lies in the block
    that came, because its token was sampled where the block was computed. A block that begins there
    begins with a row that has zeros for a state, and so does a sequence. Guesses get worse, but
    answers do not change.
    """

    def __init__(self, layer: DraftLayer, copies: Copies, group: Group | None = None) -> None:
        """`group`: the ranks that all compute the layer in the same way."""
        self._layer = layer
        self._copies = copies
        self._group = group or Solo()
        self._left: dict[int, _Left] = {}

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that have ended, or begin anew."""
        gone = list(sequence_ids)
        for sequence_id in gone:
            self._left.pop(sequence_id, None)
        self._layer.forget(gone)

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Raise AssertionError when something is held for other sequences than these."""
        others = self._left.keys() - set(sequences)
        assert not others, f"states of sequences that have ended: {sorted(others)}"
        self._layer.check_integrity(sequences)

    def try_out(self, slots: Sequence[StepSlot], like: torch.Tensor) -> None:
        """Compute rows of the layer for the tokens of these slots, after any states."""
        most = self._layer.window or max(len(slot.tokens) for slot in slots)
        last = [
            msgspec.structs.replace(
                slot, start=slot.start + max(0, len(slot.tokens) - most), tokens=slot.tokens[-most:]
            )
            for slot in slots
        ]
        read = _zeros(like, sum(len(slot.tokens) for slot in last), self._layer.reads)
        self._layer.compute(last, self._layer.states(read))

    def leave_most(self, slots: Sequence[StepSlot], like: torch.Tensor) -> None:
        """Give the sequences of these slots as many rows as can be left, of any states, so that the
        next token makes them due.
        """
        most = self._layer.block_tokens or _MOST_LEFT
        for slot in slots:
            num = min(most, slot.start)
            states = [_zeros(like, 1, self._layer.reads) for _ in range(num)]
            self._left[slot.sequence_id] = _Left(slot.start + 1 - num, states, [0] * (num - 1))

    def make(self, slots: Sequence[StepSlot]) -> list[StepSlot]:
        """Return the slots of a step with the likeliest tokens as drafts. A sequence with drafts
        must have been in a step before.
        """
        # A round makes a draft of the first sequences in this order.
        going = sorted(
            (slot for slot in slots if slot.num_drafts), key=lambda slot: -slot.num_drafts
        )
        if not going:
            return list(slots)
        rows, read = [], []
        for slot in going:
            left = self._left[slot.sequence_id]
            rows.append(_rows(slot, left.first, [*left.tokens, slot.tokens[0]]))
            read.append(torch.cat(left.states))
            self._left[slot.sequence_id] = _Left(slot.start + 1, [])
        made, tokens = self._layer.compute(rows, self._layer.states(torch.cat(read)))
        rounds = [tokens]
        for turn in range(1, going[0].num_drafts):
            num = sum(slot.num_drafts > turn for slot in going)
            rows = [_rows(slot, slot.start + turn, [0]) for slot in going[:num]]
            made, tokens = self._layer.compute(rows, made[:num], tokens[:num])
            rounds.append(tokens)
        found = iter(self._copies.fetch(torch.cat(rounds)).wait().tolist())
        drafts: dict[int, list[int]] = {slot.sequence_id: [] for slot in going}
        for each in rounds:
            for slot in going[: len(each)]:
                drafts[slot.sequence_id].append(next(found))
        return [
            msgspec.structs.replace(slot, tokens=[slot.tokens[0], *drafts[slot.sequence_id]])
            if slot.num_drafts
            else slot
            for slot in slots
        ]

    def keep(
        self,
        step_rows: Sequence[SlotRows],
        every: torch.Tensor,
        sampled: Mapping[int, list[int]] | None,
        *,
        handed_on: bool,
    ) -> bool:
        """Keep the states of a step, and compute the rows that must be final by now. Return whether
        there were any.

        step_rows: the rows of all slots in `every`, [rows, read width]; these may be overwritten
        afterwards. sampled: the step's tokens by sequence; None: another rank has them. handed_on:
        blocks go to other engines, with the row of the token just sampled if there is room for it.
        """
        tokens_of = self._gathered([each.slot for each in step_rows], sampled or {})
        block_tokens = self._layer.block_tokens
        rows, states = [], []
        for each in step_rows:
            slot = each.slot
            made = tokens_of.get(slot.sequence_id, [])
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
            self._layer.compute(rows, self._layer.states(torch.cat(states)))
        return bool(rows)

    def _add(self, rows: SlotRows, every: torch.Tensor, num_samples: int) -> _Left:
        """Add what a step has computed of a sequence to its rows that are left."""
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
        left.states[-1] = left.states[-1].clone()  # frees the step's other states
        return left

    def _is_due(self, left: _Left) -> bool:
        block_tokens = self._layer.block_tokens
        if block_tokens is None:
            return len(left.tokens) >= _MOST_LEFT
        return left.stop // block_tokens > left.first // block_tokens

    def _gathered(
        self, slots: Sequence[StepSlot], made: Mapping[int, list[int]]
    ) -> Mapping[int, list[int]]:
        """Return the tokens that each sequence has sampled. The lead sends them to all ranks."""
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


def _zeros(like: torch.Tensor, num_rows: int, reads: Collection[int]) -> torch.Tensor:
    """Return zeros for states [rows, read width], where those of one layer are like `like`."""
    return like.new_zeros(num_rows, len(reads) * like.shape[1])


def _rows(slot: StepSlot, first: int, tokens: list[int], *, sample: bool = True) -> StepSlot:
    """Return rows of the sequence of `slot` as a separate slot."""
    return StepSlot(
        sequence_id=slot.sequence_id, start=first, tokens=tokens, pages=slot.pages, sample=sample
    )


def last_rows(slots: Sequence[StepSlot]) -> list[int]:
    """Return the row of the last token of each slot that samples, where rows follow one another."""
    ends = itertools.accumulate(len(slot.tokens) for slot in slots)
    return [end - 1 for slot, end in zip(slots, ends, strict=True) if slot.sample]
