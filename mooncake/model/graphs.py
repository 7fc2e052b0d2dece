"""Decode steps in fixed places: one captured graph for each batch size of a ladder.

Owns the tensors a captured step reads; a step fills them and replays. Unused rows of a batch have
no KV place and no context. What captures is a port: CUDA graphs, or nothing at all.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from mooncake_kernels.reference.paged_batch import PagedBatch

from mooncake.engine.plan import StepSlot
from mooncake.model.inputs import Queries, StepInputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors

Replay = Callable[[], torch.Tensor]
"""Runs a captured step again on what its input tensors hold now; always the same output tensor."""

_TOKENS, _POSITIONS, _PLACES, _LENGTHS = range(4)
_UNUSED = (0, 0, -1, 0)


class GraphPort(Protocol):
    """Captures steps."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Run `step` to warm it up, record it, return what replays it."""


class EagerSteps:
    """Captures nothing: a replay is a call. For devices without graphs."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Return `step`."""
        return step


def ladder(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture up to `most`: 1, 2, 4, 8, every 8 up to 128, then about an
    eighth apart, so that few rows are computed for nobody.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(4 if sizes[-1] < 8 else 8, sizes[-1] // 64 * 8))
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs:
    """Logits of steps in which every sequence has one new token."""

    def __init__(
        self,
        model: KimiK2,
        kv: KvTensors,
        port: GraphPort,
        *,
        most_rows: int,
        most_pages: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture every size, the largest first: smaller ones then fit into its memory.

        most_pages: of one sequence's table. `progress(done, whole)` counts sizes.
        """
        self._model = model
        self._kv = kv
        self._block_tokens = kv.layout.block_tokens
        self._most_pages = most_pages
        pinned = model.device.type == "cuda"
        self._host = torch.zeros(4, most_rows, dtype=torch.int64, pin_memory=pinned)
        self._host_table = torch.zeros(most_rows, most_pages, dtype=torch.int32, pin_memory=pinned)
        self._values = self._host.to(model.device, copy=True)
        self._table = self._host_table.to(model.device, copy=True)
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=model.device)
        self._written: list[list[int]] = [[] for _ in range(most_rows)]
        self._sizes = ladder(most_rows)
        self._replays: dict[int, Replay] = {}
        self._fill([], most_rows)
        for done, size in enumerate(reversed(self._sizes), start=1):
            self._replays[size] = port.capture(self._step(size))
            if progress is not None:
                progress(done, len(self._sizes))

    def takes(self, slots: Sequence[StepSlot]) -> bool:
        """Whether a step of these slots can be replayed."""
        return 0 < len(slots) <= self._sizes[-1] and all(
            len(slot.tokens) == 1 and len(slot.pages) <= self._most_pages for slot in slots
        )

    def logits(self, slots: Sequence[StepSlot]) -> torch.Tensor:
        """Return [slots, vocab] float32, overwritten by the next call. Waits for no device.

        Raises:
            ValueError: a page table does not cover its sequence.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, len(slots))]
        self._fill(slots, size)
        return self._replays[size]()[: len(slots)]

    def _step(self, size: int) -> Callable[[], torch.Tensor]:
        values = self._values

        def step() -> torch.Tensor:
            batch = PagedBatch(
                self._starts[: size + 1],
                values[_LENGTHS, :size].to(torch.int32),
                self._table[:size],
                max_rows=1,
            )
            positions = values[_POSITIONS, :size]
            queries = Queries(positions, None, (), (), size, batch)
            inputs = StepInputs(
                values[_TOKENS, :size], positions, values[_PLACES, :size], queries, queries, ()
            )
            return self._model.logits(self._model.forward(inputs, self._kv))

        return step

    def _fill(self, slots: Sequence[StepSlot], size: int) -> None:
        """Write the step into the tensors that replays read."""
        entries = [self._entry(slot) for slot in slots] + [_UNUSED] * (size - len(slots))
        self._host[:, :size] = torch.tensor(entries, dtype=torch.int64).t()
        changed = [row for row, slot in enumerate(slots) if self._written[row] != slot.pages]
        for row in changed:
            pages = slots[row].pages
            self._host_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._written[row] = list(pages)
        self._values[:, :size].copy_(self._host[:, :size], non_blocking=True)
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            self._table[rows].copy_(self._host_table[rows], non_blocking=True)

    def _entry(self, slot: StepSlot) -> tuple[int, int, int, int]:
        page, offset = divmod(slot.start, self._block_tokens)
        if page >= len(slot.pages):
            raise ValueError(
                f"sequence {slot.sequence_id}: {slot.start + 1} tokens need {page + 1} pages, the "
                f"table has {len(slot.pages)}"
            )
        place = slot.pages[page] * self._block_tokens + offset
        return slot.tokens[0], slot.start, place, slot.start + 1
