"""The rows of captured steps over KV pages, in tensors that replays read. Owns these tensors: a
step writes its rows into them. Unused rows have no KV place and no context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mooncake_kernels.reference.paged_batch import PagedBatch

from mooncake.engine.plan import StepSlot
from mooncake.model.copies import Copies
from mooncake.model.inputs import Queries, StepInputs
from mooncake.model.kv_tensors import KvTensors

_TOKENS, _POSITIONS, _PLACES, _LENGTHS, _ENDS = range(5)
_UNUSED = (0, 0, -1)


@dataclass(frozen=True)
class Rows:
    """What the rows of a step read and write.

    rows: (token, position, place) of each. spans: (page table, tokens in this rank's pages, rows)
    of each run of rows that end one context.
    """

    rows: Sequence[tuple[int, int, int]] = ()
    spans: Sequence[tuple[Sequence[int], int, int]] = ()


class CapturedRows:
    """Tensors for up to `most_rows` rows."""

    def __init__(
        self,
        kv: KvTensors,
        device: torch.device,
        copies: Copies,
        *,
        most_rows: int,
        most_pages: int,
        most_of_slot: int,
    ) -> None:
        """most_pages: the most pages in a sequence's table. most_of_slot: the most rows of a
        sequence. copies: to `device`.
        """
        self._kv = kv
        self._block_tokens = kv.layout.block_tokens
        self._copies = copies
        self._most_rows, self._most_pages = most_rows, most_pages
        self._most_of_slot = most_of_slot
        # Where ranks share contexts out, each row sees its own part of these.
        self._joins_rows = most_of_slot > 1 and kv.home.num_homes == 1
        self._values = torch.zeros(5, most_rows, dtype=torch.int64, device=device)
        self._table = torch.zeros(most_rows, most_pages, dtype=torch.int32, device=device)
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._written: list[list[int]] = [[] for _ in range(most_rows)]
        self.fill(Rows(), most_rows)

    def takes(self, slots: Sequence[StepSlot]) -> bool:
        """Whether there is room for all tokens of these slots."""
        return 0 < sum(len(slot.tokens) for slot in slots) <= self._most_rows and all(
            len(slot.tokens) <= self._most_of_slot and len(slot.pages) <= self._most_pages
            for slot in slots
        )

    def of(self, slots: Sequence[StepSlot], ahead: int = 0) -> Rows:
        """Return the rows of all tokens of `slots`, or those `ahead` tokens after them.

        Raises:
            ValueError: a page table does not cover its sequence.
        """
        rows, spans = [], []
        for slot in slots:
            for number, token in enumerate(slot.tokens):
                place, length = self._place(slot, slot.start + number + ahead)
                rows.append((token, slot.start + number + ahead, place))
                if not self._joins_rows:
                    spans.append((slot.pages, length, 1))
            if self._joins_rows:
                spans.append((slot.pages, length, len(slot.tokens)))
        return Rows(rows, spans)

    def fill(self, step: Rows, size: int, tokens: torch.Tensor | None = None) -> None:
        """Write the rows of a step, of which `size` are computed. tokens: [rows] int64 on the
        device, in place of those of `step`.
        """
        rows = [*step.rows, *[_UNUSED] * (size - len(step.rows))]
        lengths = [length for _, length, _ in step.spans]
        ends = list(itertools.accumulate(count for _, _, count in step.spans))
        no_spans = size - len(lengths)
        columns = torch.tensor(
            [*zip(*rows, strict=True), lengths + [0] * no_spans, ends + [len(step.rows)] * no_spans]
        )
        self._values[:, :size].copy_(self._copies.send(columns))
        if tokens is not None:
            self._values[_TOKENS, : len(step.rows)].copy_(tokens)
        tables = [pages for pages, _, _ in step.spans]
        changed = [at for at, pages in enumerate(tables) if self._written[at] != pages]
        if not changed:
            return
        first, last = changed[0], changed[-1] + 1
        width = max(len(pages) for pages in tables[first:last])
        table = torch.zeros(last - first, width, dtype=torch.int32)
        for at in range(first, last):
            self._written[at] = list(tables[at])
            pages = self._mine(tables[at])
            table[at - first, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._table[first:last, :width].copy_(self._copies.send(table))

    def inputs(self, size: int) -> StepInputs:
        """Return the first `size` rows as a step's inputs; a captured step asks for them."""
        values = self._values
        if self._joins_rows:
            self._starts[1 : size + 1].copy_(values[_ENDS, :size])
        batch = PagedBatch(
            self._starts[: size + 1],
            values[_LENGTHS, :size].to(torch.int32),
            self._table[:size],
            max_rows=self._most_of_slot if self._joins_rows else 1,
        )
        positions = values[_POSITIONS, :size]
        queries = Queries(positions, None, (), (), size, batch)
        return StepInputs(
            values[_TOKENS, :size], positions, values[_PLACES, :size], queries, queries, ()
        )

    def _place(self, slot: StepSlot, at: int) -> tuple[int, int]:
        """Return where the KV of a sequence's token goes, and how many tokens up to it lie in this
        rank's pages.
        """
        page, offset = divmod(at, self._block_tokens)
        if page >= len(slot.pages):
            raise ValueError(
                f"sequence {slot.sequence_id}: {at + 1} tokens need {page + 1} pages, the table "
                f"has {len(slot.pages)}"
            )
        if self._kv.home.num_homes == 1:
            return slot.pages[page] * self._block_tokens + offset, at + 1
        # What of the context lies in this rank's pages, and whether the token does.
        mine, last = self._mine(slot.pages[: page + 1]), self._mine([slot.pages[page]])
        length = len(mine) * self._block_tokens
        if not last:
            return -1, length
        place = last[0] * self._block_tokens + offset
        return place, length - self._block_tokens + offset + 1

    def _mine(self, pages: Sequence[int]) -> Sequence[int]:
        """Return the pages that this rank holds, as it counts them."""
        home, each = self._kv.home, self._kv.num_pages
        if home.num_homes == 1:
            return pages
        return [page % each for page in pages if page // each == home.home]
