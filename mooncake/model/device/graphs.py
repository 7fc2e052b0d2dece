"""Decode steps over fixed buffers: one captured graph for each number of rows of a ladder. A
sequence has a row for its last token, and one for each draft behind it.

A step fills the tensors that a captured step reads, and replays. What captures is a port: CUDA
graphs, or nothing at all. Where ranks share the model, each captures the same sizes in the same
order, exchanges included, but for what stages pass on: that comes before and after a replay.
Instances that share experts agree before each step on one size, and replay it when none of them has
another kind of step.

A batch that has settled runs ahead: its next step begins with the sampled tokens as they lie on the
device, while the host still reads them. What it writes lies behind every sequence's known tokens,
in pages that were the sequence's when it began, and before whatever comes later: a guess that turns
out wrong is dropped and leaves no trace.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mooncake.engine.plan import StepSlot
from mooncake.model.copies import Copies, HostCopies, Mark
from mooncake.model.device.captured_rows import CapturedRows, Rows
from mooncake.model.inputs import SlotRows
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.kv_tensors import KvTensors

Replay = Callable[[], torch.Tensor]
"""Runs a captured step again on the present content of its input tensors. It always returns the
same output tensor.
"""

MOST_ROWS = 256
"""The rows of the largest captured step with drafts, unless there may be as many sequences. Larger
steps take the device longer than the host.
"""
_SETTLED = 8
"""After this many decode steps of the same sequences (or fewer) in a row, a step is begun on a
guess. A wrong guess costs a step; a right one saves the host's part of it.
"""


class GraphPort(Protocol):
    """Captures steps."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Run `step` to warm it up, record it, and return its replay."""


class EagerSteps:
    """Captures nothing: a replay is a call. It is for devices without graphs."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        return step


def ladder(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture up to `most`: 1, 2, 4, 8, every 8 up to 128, then in steps
    of about an eighth, so that few padding rows are computed.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(4 if sizes[-1] < 8 else 8, sizes[-1] // 64 * 8))
    return (*(size for size in sizes if size < most), most)


@dataclass
class _Ahead:
    """A step begun before it was planned."""

    slots: Sequence[StepSlot]
    """The slots of the step before it."""
    logits: torch.Tensor
    tokens: Sequence[int] | None = None
    """The tokens that the step before it sampled, once the host knows them."""

    def rows(self, slots: Sequence[StepSlot]) -> list[int] | None:
        """Return the row of each of these slots. Returns None unless this step computes all of
        them.
        """
        if self.tokens is None:
            return None
        places = {slot.sequence_id: row for row, slot in enumerate(self.slots)}
        found = []
        for slot in slots:
            row = places.get(slot.sequence_id)
            if row is None:
                return None
            before = self.slots[row]
            follows = slot.start == before.start + 1 and slot.tokens == [self.tokens[row]]
            if not follows or slot.pages[: len(before.pages)] != before.pages:
                return None
            found.append(row)
        return found


def most_rows(most_sequences: int, most_drafts: int) -> int:
    """Return the rows of the largest captured step, of which each sequence has one and its
    drafts.
    """
    return max(most_sequences, min(most_sequences * (1 + most_drafts), MOST_ROWS))


class DecodeGraphs:
    """Logits of steps in which every sequence has one new token, and perhaps drafts behind it."""

    def __init__(
        self,
        model: KimiK2,
        kv: KvTensors,
        port: GraphPort,
        *,
        most_sequences: int,
        most_pages: int,
        copies: Copies | None = None,
        most_drafts: int = 0,
        reads: tuple[int, ...] = (),
    ) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory.

        most_pages: the most pages in a sequence's table. copies: to the model's device; None: the
        model is on the host. most_drafts: the most drafts of a sequence. reads: the layers whose
        inputs `read_rows` returns; see `ReadStates`.
        """
        self._model = model
        self._kv = kv
        self._block_tokens = kv.layout.block_tokens
        self._copies = copies or HostCopies()
        device, hidden = model.device, model.spec.hidden_size
        rows = most_rows(most_sequences, most_drafts)
        self._rows = CapturedRows(
            kv, device, self._copies,
            most_rows=rows, most_pages=most_pages, most_of_slot=1 + most_drafts,
        )  # fmt: skip
        # One for all sizes: a graph keeps its outputs, and float32 logits are large.
        width, dtype = model.spec.vocab_size, torch.float32
        if not model.stage.is_last:
            width, dtype = hidden, model.dtype
        self._made = torch.empty(rows, width, dtype=dtype, device=device)
        self._got: torch.Tensor | None = None
        """The rows that the stage before sends; None: this stage is the first."""
        if not model.stage.is_first:
            self._got = torch.zeros(rows, hidden, dtype=model.dtype, device=device)
        self._reads = reads
        self._read = torch.zeros(len(reads), rows, hidden, dtype=model.dtype, device=device)
        self._sizes = ladder(rows)
        self._replays: dict[int, Replay] = {}
        self._ahead: _Ahead | None = None
        self.last_guess: Mark | None = None
        """A mark after the last step that ran ahead. Transfers wait for it before they write to
        pages: only the order of the device's work keeps a wrong guess away from these.
        """
        self._last: Sequence[StepSlot] = ()
        self._num_alike = 0
        for size in reversed(self._sizes):
            if model.exchange is not None:
                model.exchange.fix(size)
            self._replays[size] = port.capture(self._step(size))

    def takes(self, slots: Sequence[StepSlot]) -> bool:
        """Whether a step of these slots can be replayed."""
        return self._rows.takes(slots) and all(
            len(slot.tokens) == 1 + slot.num_drafts for slot in slots
        )

    def has_begun(self, slots: Sequence[StepSlot]) -> bool:
        """Return whether the step of these slots has already been started ahead of time."""
        return self._ahead is not None and self._ahead.rows(slots) is not None

    def logits(self, slots: Sequence[StepSlot]) -> torch.Tensor:
        """Return [rows, vocab] float32 of all tokens of the slots, overwritten by the next call; of
        a stage before the last [rows, hidden]. Waits for no device, unless stages pass something
        on.

        Raises:
            ValueError: a page table does not cover its sequence.
        """
        ahead, self._ahead = self._ahead, None
        self._note(slots)
        rows = None if ahead is None else ahead.rows(slots)
        if ahead is not None and rows is not None:
            if rows == list(range(len(rows))):
                return ahead.logits[: len(rows)]
            return ahead.logits.index_select(0, self._copies.send(torch.tensor(rows)))
        return self.replay(slots)

    def replay(self, slots: Sequence[StepSlot]) -> torch.Tensor:
        """Return `logits` of a step that did not run ahead, or whose guess was wrong."""
        self._ahead = None
        return self._replay(self._rows.of(slots))

    def read_rows(self, slots: Sequence[StepSlot]) -> tuple[list[SlotRows], torch.Tensor]:
        """Return where the rows of the last step's slots lie in what it has read, and what `reads`
        names of them, [rows, read width], overwritten by the next step.
        """
        rows, first = [], 0
        for slot in slots:
            rows.append(SlotRows(slot, first, len(slot.tokens)))
            first += len(slot.tokens)
        return rows, torch.cat(list(self._read[:, :first]), dim=-1)

    def serve(self) -> None:
        """Take part, without rows, in a step of other instances that share experts."""
        model = self._model
        assert model.exchange is not None, "this rank shares no experts"
        model.between_steps()
        size = model.exchange.agree(0, 0, self._sizes[0])
        if not size:
            model.serve_agreed()
            return
        self._rows.fill(Rows(), size)
        self._replays[size]()

    def settled(self, slots: Sequence[StepSlot]) -> bool:
        """Whether the next step after that of `slots`, the last, may run ahead: it is worth it, and
        no page is missing.
        """
        if self._model.exchange is not None:  # other instances would have to guess, too
            return False
        room = all(
            len(slot.tokens) == 1 and slot.start + 1 < len(slot.pages) * self._block_tokens
            for slot in slots
        )
        return self._num_alike >= _SETTLED and room

    def run_ahead(self, slots: Sequence[StepSlot], tokens: torch.Tensor) -> None:
        """Begin the next step after that of `slots`, which has `settled` and has sampled `tokens`
        [slots] int64 on the device.

        Overwrites the logits of that step. The guess counts once `confirm` has given the host the
        tokens.
        """
        self._ahead = _Ahead(slots, self._replay(self._rows.of(slots, 1), tokens))
        self.last_guess = self._copies.mark()

    def confirm(self, tokens: Sequence[int]) -> None:
        """Record the values of the tokens given to `run_ahead`. This has no effect when no step
        runs ahead.
        """
        if self._ahead is not None:
            self._ahead.tokens = tokens

    def interrupt(self) -> None:
        """Drop the step that runs ahead, because a step of another kind comes first."""
        self._ahead, self._last, self._num_alike = None, (), 0

    def _note(self, slots: Sequence[StepSlot]) -> None:
        before = {slot.sequence_id for slot in self._last}
        alike = all(slot.sequence_id in before for slot in slots)
        self._num_alike = self._num_alike + 1 if alike else 0
        self._last = slots

    def _replay(self, rows: Rows, tokens: torch.Tensor | None = None) -> torch.Tensor:
        self._model.between_steps()
        num_rows = len(rows.rows)
        size, step = self._agreed(self._sizes[bisect.bisect_left(self._sizes, num_rows)])
        self._rows.fill(rows, size, tokens)
        stage, got, reads = self._model.stage, self._got, ReadStates(self._reads)
        stage.begin()
        if got is not None:
            num = reads.num_before(stage.layers[0])
            came = stage.receive(got.new_empty((1 + num) * size, got.shape[1]))
            got[:size].copy_(came[:size])
            if num:
                self._read[:num, :size].copy_(came[size:].view(num, size, -1))
        made = step()
        if not stage.is_last:
            num = reads.num_before(stage.layers[-1] + 1)
            stage.send(torch.cat((made, *self._read[:num, :size])) if num else made)
        return made[:num_rows]

    def _agreed(self, size: int) -> tuple[int, Replay]:
        """Return how many rows a step that needs `size` computes, and the step. When an instance
        that shares experts replays none, it is not replayed here either.
        """
        exchange = self._model.exchange
        if exchange is None:
            return size, self._replays[size]
        if agreed := exchange.agree(size, size, size):
            return agreed, self._replays[agreed]
        return size, self._step(size)

    def _step(self, size: int) -> Callable[[], torch.Tensor]:
        model, made = self._model, self._made[:size]
        got = None if self._got is None else self._got[:size]

        def step() -> torch.Tensor:
            inputs = self._rows.inputs(size)
            read = ReadStates(self._reads, self._read[:, :size]) if self._reads else None
            states = model.compute(inputs, self._kv, got, None, read)
            return model.logits(states, made) if model.stage.is_last else made.copy_(states)

        return step
