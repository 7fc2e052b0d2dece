"""A step plan as tensors: which rows are computed, where their KV goes, who attends to what.

Built once a step and the same for every layer. Cheap rows (few new tokens) come first, so that
either form of attention works on a slice of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from mooncake_kernels.reference.paged import PagedSpan, paged_span, sent
from mooncake_kernels.reference.paged_batch import PagedBatch, batch_of_spans

from mooncake.engine.plan import StepSlot

_FEW_ROWS = 4

PrefersAbsorbed = Callable[[int, int], bool]
"""(new tokens, context) -> whether the absorbed form is the cheaper one."""


@dataclass(frozen=True)
class Queries:
    """The rows that attend: the first `split` rows in the absorbed form, the rest expanded.

    Rows of absorbed spans count from 0, rows of expanded spans from `split`. `rows` says which rows
    of the step these are (None: all, in order). `batch`: the absorbed rows described on the device
    in place of spans, as a captured step has them.
    """

    positions: torch.Tensor
    rows: torch.Tensor | None
    absorbed: tuple[PagedSpan, ...]
    expanded: tuple[PagedSpan, ...]
    split: int
    batch: PagedBatch | None = None

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def few_rows(self) -> bool:
        """Whether each absorbed span has so few rows that each may read its keys by itself."""
        return all(span.num_rows <= _FEW_ROWS for span in self.absorbed)

    @functools.cached_property
    def host_batch(self) -> PagedBatch:
        """The absorbed spans as one batch in host memory, made once a step."""
        return batch_of_spans(self.absorbed, torch.device("cpu"))

    def to(self, device: torch.device) -> Queries:
        """Return the same with its tensors on `device`; spans stay with the host."""
        rows = None if self.rows is None else sent(self.rows, device)
        return replace(self, positions=sent(self.positions, device), rows=rows)


@dataclass(frozen=True)
class OutputRows:
    """Rows of the final hidden states that one slot wants: all of its tokens, or the last."""

    slot: StepSlot
    first: int
    num_rows: int


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one forward pass over `tokens` [rows] at `positions` [rows].

    `places` [rows]: where each row's KV goes. `queries`: all rows, for every layer but the last.
    `outputs`: the rows of the last layer that anybody reads, in the order of `output_rows`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    queries: Queries
    outputs: Queries
    output_rows: tuple[OutputRows, ...]

    def to(self, device: torch.device) -> StepInputs:
        """Return the same with its tensors on `device`."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=sent(self.tokens, device),
            positions=sent(self.positions, device),
            places=sent(self.places, device),
            queries=self.queries.to(device),
            outputs=self.outputs.to(device),
        )


def build_inputs(
    slots: Sequence[StepSlot],
    whole: frozenset[int],
    kv_shape: torch.Size,
    prefers_absorbed: PrefersAbsorbed,
) -> StepInputs:
    """Return the inputs of one step; `slots` is not empty.

    whole: sequences whose every row is wanted at the end (prompt logprobs), not the last only.
    kv_shape: [num_pages, block_tokens, kv_width] of one layer.

    Raises:
        ValueError: a slot is empty or its page table does not cover it; names the sequence.
    """
    _check(slots)
    computed = _arranged([_Wanted(slot, len(slot.tokens)) for slot in slots], prefers_absorbed)
    first_row, total = {}, 0
    for want, _ in computed:
        first_row[want.slot.sequence_id] = total
        total += want.count
    read = [
        _Wanted(slot, len(slot.tokens) if slot.sequence_id in whole else 1)
        for slot in slots
        if slot.sample or slot.sequence_id in whole
    ]
    outputs = _arranged(read, prefers_absorbed)
    queries = _queries(computed, None, kv_shape)  # checks the page tables that _places relies on
    return StepInputs(
        tokens=torch.tensor([token for want, _ in computed for token in want.slot.tokens]),
        positions=_joined([want.positions() for want, _ in computed]),
        places=_joined([_places(want, kv_shape[1]) for want, _ in computed]),
        queries=queries,
        outputs=queries
        if outputs == computed
        else _queries(outputs, _joined([_rows(want, first_row) for want, _ in outputs]), kv_shape),
        output_rows=_output_rows(outputs),
    )


@dataclass(frozen=True)
class _Wanted:
    """The last `count` tokens of a slot."""

    slot: StepSlot
    count: int

    @property
    def context(self) -> int:
        return self.slot.start + len(self.slot.tokens)

    @property
    def skipped(self) -> int:
        return len(self.slot.tokens) - self.count

    def positions(self) -> torch.Tensor:
        return torch.arange(self.context - self.count, self.context)


_Arranged = Sequence[tuple[_Wanted, bool]]
"""Each with whether it is absorbed; those first."""


def _check(slots: Sequence[StepSlot]) -> None:
    seen: set[int] = set()
    for slot in slots:
        if not slot.tokens or slot.start < 0:
            raise ValueError(f"sequence {slot.sequence_id}: a slot without tokens or before 0")
        if slot.sequence_id in seen:
            raise ValueError(f"sequence {slot.sequence_id} has two slots in one step")
        seen.add(slot.sequence_id)


def _arranged(wanted: Sequence[_Wanted], prefers_absorbed: PrefersAbsorbed) -> _Arranged:
    marked = [(want, prefers_absorbed(want.count, want.context)) for want in wanted]
    return sorted(marked, key=lambda entry: not entry[1])


def _queries(arranged: _Arranged, rows: torch.Tensor | None, kv_shape: torch.Size) -> Queries:
    absorbed: list[PagedSpan] = []
    expanded: list[PagedSpan] = []
    num_absorbed = num_expanded = 0
    for want, is_absorbed in arranged:
        if is_absorbed:
            absorbed.append(_span(want, num_absorbed, kv_shape))
            num_absorbed += want.count
        else:
            expanded.append(_span(want, num_expanded, kv_shape))
            num_expanded += want.count
    positions = _joined([want.positions() for want, _ in arranged])
    return Queries(positions, rows, tuple(absorbed), tuple(expanded), num_absorbed)


def _span(want: _Wanted, first_row: int, kv_shape: torch.Size) -> PagedSpan:
    try:
        return paged_span(first_row, want.count, want.context, want.slot.pages, kv_shape)
    except ValueError as error:
        raise ValueError(f"sequence {want.slot.sequence_id}: {error}") from error


def _rows(want: _Wanted, first_row: Mapping[int, int]) -> torch.Tensor:
    return torch.arange(want.count) + first_row[want.slot.sequence_id] + want.skipped


def _places(want: _Wanted, block_tokens: int) -> torch.Tensor:
    positions = want.positions()
    pages = torch.tensor(want.slot.pages)
    return pages[positions // block_tokens] * block_tokens + positions % block_tokens


def _output_rows(outputs: _Arranged) -> tuple[OutputRows, ...]:
    rows, first = [], 0
    for want, _ in outputs:
        rows.append(OutputRows(want.slot, first, want.count))
        first += want.count
    return tuple(rows)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
