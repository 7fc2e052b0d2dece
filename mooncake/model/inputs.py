"""A step plan as tensors: which rows are computed, where their KV goes, and who attends to what.

It is built once per step and is the same for every layer. Cheap rows (few new tokens) come first,
so that either form of attention works on a slice of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from mooncake_kernels.reference.paged import PagedSpan, page_table, paged_span, sent
from mooncake_kernels.reference.paged_batch import PagedBatch, batch_of_spans

from mooncake.base.kv_layout import ALL_PAGES, Home
from mooncake.engine.plan import StepSlot

_FEW_ROWS = 8
"""At most as many rows as a last token with its drafts. With compiled code, five rows of k2-small
take 0.4 to 0.6 of the time, alone and in a batch of 16.
"""

PrefersAbsorbed = Callable[[int, int], bool]
"""(new tokens, context) -> whether the absorbed form is the cheaper one."""


@dataclass(frozen=True)
class Queries:
    """The rows that attend: the first `split` rows in the absorbed form, the rest expanded.

    Rows of absorbed spans count from 0, rows of expanded spans from `split`.

    rows: which rows of the step these are (None: all, in order). batch: in a captured step, the
    description of the absorbed rows on the device, instead of spans.

    Where ranks share out the pages, absorbed spans are single rows over the pages of this rank.
    Expanded spans lie over the gathered pages of all ranks: page `i * ranks + r` is the i-th in the
    list `gathered` of rank r. These lists are equally long on all ranks; the padding is not read.
    """

    positions: torch.Tensor
    rows: torch.Tensor | None
    absorbed: tuple[PagedSpan, ...]
    expanded: tuple[PagedSpan, ...]
    split: int
    batch: PagedBatch | None = None
    gathered: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def few_rows(self) -> bool:
        """Whether each absorbed span has so few rows that each row may read its keys by itself."""
        return all(span.num_rows <= _FEW_ROWS for span in self.absorbed)

    @functools.cached_property
    def span_batch(self) -> PagedBatch:
        """The absorbed spans as one batch on the rows' device, made once per step."""
        return batch_of_spans(self.absorbed, self.positions.device)

    def to(self, device: torch.device) -> Queries:
        """Return the same queries with their tensors on `device`. Spans stay on the host."""
        rows = None if self.rows is None else sent(self.rows, device)
        gathered = None if self.gathered is None else sent(self.gathered, device)
        positions = sent(self.positions, device)
        return replace(self, positions=positions, rows=rows, gathered=gathered)


@dataclass(frozen=True)
class SlotRows:
    """Rows of one slot, in a step's inputs or in the final hidden states that it wants. The latter
    are the rows of all its tokens, or of the last token and its drafts.
    """

    slot: StepSlot
    first: int
    num_rows: int


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one forward pass over `tokens` [rows] at `positions` [rows].

    places: [rows], where each row's KV goes; below 0: another rank keeps it. queries: all rows, for
    every layer but the last. outputs: the rows of the last layer that are read, in the order of
    `output_rows`. input_rows: to which slots the rows belong.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    queries: Queries
    outputs: Queries
    output_rows: tuple[SlotRows, ...]
    input_rows: tuple[SlotRows, ...] = ()

    def to(self, device: torch.device) -> StepInputs:
        """Return the same inputs with their tensors on `device`."""
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


class PageTables:
    """Page tables of the last step's sequences as tensors. For a table that grows, only its end is
    read.

    64 tables of 128k tokens take some 4 ms to read and half of one to compare.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], torch.Tensor]] = {}

    def read(self, slots: Sequence[StepSlot]) -> dict[int, torch.Tensor]:
        """Return the table of each sequence, int32. Tables of other sequences are forgotten."""
        self._known = {slot.sequence_id: self._table(slot) for slot in slots}
        return {sequence: table for sequence, (_, table) in self._known.items()}

    def _table(self, slot: StepSlot) -> tuple[list[int], torch.Tensor]:
        known = self._known.get(slot.sequence_id)
        if known is not None and known[0] == slot.pages:
            return known
        pages = list(slot.pages)  # a caller's own list may grow
        if known is None or pages[: len(known[0])] != known[0]:
            return pages, page_table(pages)
        return pages, torch.cat((known[1], page_table(pages[len(known[0]) :])))


def build_inputs(
    slots: Sequence[StepSlot],
    whole: frozenset[int],
    kv_shape: torch.Size,
    prefers_absorbed: PrefersAbsorbed,
    tables: PageTables | None = None,
    home: Home = ALL_PAGES,
) -> StepInputs:
    """Return the inputs of one step; `slots` is not empty.

    whole: sequences for which all rows are wanted at the end (prompt logprobs), not only the last.
    kv_shape: [num_pages, block_tokens, kv_width] of one layer, of this rank. tables: kept from step
    to step. home: which of the engine's pages are this rank's. When other ranks hold more, single
    rows are absorbed, and no others.

    Raises:
        ValueError: a slot is empty or its page table does not cover it; the message names the
            sequence.
    """
    _check(slots)
    if home.num_homes > 1:
        prefers_absorbed = _single_rows
    read_tables = (tables or PageTables()).read(slots)
    computed = _arranged([_Wanted(slot, len(slot.tokens)) for slot in slots], prefers_absorbed)
    first_row, total = {}, 0
    for want, _ in computed:
        first_row[want.slot.sequence_id] = total
        total += want.count
    read = [
        _Wanted(slot, len(slot.tokens) if slot.sequence_id in whole else 1 + slot.num_drafts)
        for slot in slots
        if slot.sample or slot.sequence_id in whole
    ]
    outputs = _arranged(read, prefers_absorbed)
    # Checks the page tables that _places relies on.
    queries = _queries(computed, None, kv_shape, read_tables, home)
    return StepInputs(
        tokens=torch.tensor([token for want, _ in computed for token in want.slot.tokens]),
        positions=_numbers([want.positions() for want, _ in computed]),
        places=_numbers([_places(want, kv_shape, home) for want, _ in computed]),
        queries=queries,
        outputs=queries
        if outputs == computed
        else _queries(
            outputs,
            _numbers([_rows(want, first_row) for want, _ in outputs]),
            kv_shape,
            read_tables,
            home,
        ),
        output_rows=_slot_rows(outputs),
        input_rows=_slot_rows(computed),
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

    def positions(self) -> range:
        return range(self.context - self.count, self.context)


_Arranged = Sequence[tuple[_Wanted, bool]]
"""Each entry says whether it is absorbed. Absorbed ones come first, and of these the ones with a
single row.
"""


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
    return sorted(marked, key=lambda entry: (not entry[1], entry[0].count > 1))


def _single_rows(new: int, _context: int) -> bool:
    return new == 1


def _queries(
    arranged: _Arranged,
    rows: torch.Tensor | None,
    kv_shape: torch.Size,
    tables: Mapping[int, torch.Tensor],
    home: Home,
) -> Queries:
    if home.num_homes > 1:
        return _shared_queries(arranged, rows, kv_shape, tables, home)
    absorbed: list[PagedSpan] = []
    expanded: list[PagedSpan] = []
    num_absorbed = num_expanded = 0
    for want, is_absorbed in arranged:
        if is_absorbed:
            absorbed.append(_span(want, num_absorbed, kv_shape, tables))
            num_absorbed += want.count
        else:
            expanded.append(_span(want, num_expanded, kv_shape, tables))
            num_expanded += want.count
    positions = _numbers([want.positions() for want, _ in arranged])
    return Queries(positions, rows, tuple(absorbed), tuple(expanded), num_absorbed)


def _shared_queries(
    arranged: _Arranged,
    rows: torch.Tensor | None,
    kv_shape: torch.Size,
    tables: Mapping[int, torch.Tensor],
    home: Home,
) -> Queries:
    """Return the queries when each rank has its share of the pages."""
    num_homes, (each, block_tokens, width) = home.num_homes, kv_shape
    whole_shape = torch.Size((num_homes * each, block_tokens, width))
    spans = [_span(want, 0, whole_shape, tables) for want, _ in arranged]
    split = sum(is_absorbed for _, is_absorbed in arranged)
    absorbed = [_own_part(span, row, kv_shape, home) for row, span in enumerate(spans[:split])]
    lists: list[dict[int, int]] = [{} for _ in range(num_homes)]
    for span in spans[split:]:
        for page in span.pages.tolist():
            of_home = lists[page // each]
            of_home.setdefault(page, len(of_home))
    longest = max(map(len, lists))
    gathered_shape = torch.Size((longest * num_homes, block_tokens, width))
    expanded, first = [], 0
    for span in spans[split:]:
        table = [
            lists[page // each][page] * num_homes + page // each for page in span.pages.tolist()
        ]
        expanded.append(paged_span(first, span.num_rows, span.context, table, gathered_shape))
        first += span.num_rows
    mine = [page % each for page in lists[home.home]]
    return Queries(
        positions=_numbers([want.positions() for want, _ in arranged]),
        rows=rows,
        absorbed=tuple(absorbed),
        expanded=tuple(expanded),
        split=split,
        gathered=torch.tensor([*mine, *[0] * (longest - len(mine))]) if longest else None,
    )


def _own_part(span: PagedSpan, row: int, kv_shape: torch.Size, home: Home) -> PagedSpan:
    """Return what a single row sees of its context in this rank's pages, which may be nothing."""
    each, block_tokens, _ = kv_shape
    homes = span.pages // each
    mine = span.pages[homes == home.home] % each
    context = len(mine) * block_tokens
    if homes[-1] == home.home:
        context -= len(span.pages) * block_tokens - span.context
    return PagedSpan(row, 1, context, mine, block_tokens)


def _span(
    want: _Wanted, first_row: int, kv_shape: torch.Size, tables: Mapping[int, torch.Tensor]
) -> PagedSpan:
    table = tables[want.slot.sequence_id]
    try:
        return paged_span(first_row, want.count, want.context, table, kv_shape)
    except ValueError as error:
        raise ValueError(f"sequence {want.slot.sequence_id}: {error}") from error


def _rows(want: _Wanted, first_row: Mapping[int, int]) -> range:
    first = first_row[want.slot.sequence_id] + want.skipped
    return range(first, first + want.count)


def _places(want: _Wanted, kv_shape: torch.Size, home: Home) -> list[int]:
    each, block_tokens, _ = kv_shape
    pages = want.slot.pages
    if home.num_homes > 1:
        pages = [page % each if page // each == home.home else -1 for page in pages]
    places = [
        pages[at // block_tokens] * block_tokens + at % block_tokens for at in want.positions()
    ]
    return places if home.num_homes == 1 else [max(-1, place) for place in places]


def _slot_rows(arranged: _Arranged) -> tuple[SlotRows, ...]:
    rows, first = [], 0
    for want, _ in arranged:
        rows.append(SlotRows(want.slot, first, want.count))
        first += want.count
    return tuple(rows)


def _numbers(parts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the parts as one int64 tensor, without making a tensor for each of many small
    parts.
    """
    return torch.tensor([number for part in parts for number in part], dtype=torch.int64)
