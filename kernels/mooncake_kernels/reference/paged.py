"""Rows of queries, and the pages that hold their keys: the arguments of the attention ops."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_MIN_RUN_PAGES = 4
"""Shorter runs of neighbouring pages are copied together. Longer ones are read in place."""


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on `device`, without waiting for a GPU's earlier work."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True)
class Section:
    """Some tokens of a context in order: a slice of the flat KV, or pages to be copied out
    of it.
    """

    num_tokens: int
    begin: int
    pages: torch.Tensor | None
    _there: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False)
    """The pages on the devices where they were read, so that only the first layer sends them."""

    def read(self, kv: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, width] of `kv` [pages, block_tokens, width], as a view if
        possible.
        """
        if self.pages is None:
            return kv.view(-1, kv.shape[-1])[self.begin : self.begin + self.num_tokens]
        pages = self._there.get(kv.device)
        if pages is None:
            pages = self._there[kv.device] = sent(self.pages, kv.device)
        if kv.dtype == torch.float8_e4m3fn:  # not every torch moves e4m3 by index
            copied = kv.view(torch.uint8).index_select(0, pages).view(kv.dtype)
        else:
            copied = kv.index_select(0, pages)
        return copied.view(-1, kv.shape[-1])[: self.num_tokens]


@dataclass(frozen=True, eq=False)
class PagedSpan:
    """`num_rows` query rows from `first_row` on: the last tokens of a context of `context` tokens.

    Row i of the span sees the first `context - num_rows + 1 + i` keys. `pages` is the page table,
    int32 on the host, and `sections` says how to read it. A span is equal only to itself, so that
    results for a step's spans are found again without comparing their tables.
    """

    first_row: int
    num_rows: int
    context: int
    pages: torch.Tensor
    block_tokens: int

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        return tuple(_sections(self.pages.tolist(), self.context, self.block_tokens))

    def keys(self, kv: torch.Tensor) -> list[torch.Tensor]:
        """Return the context's rows of `kv` [pages, block_tokens, width], in parts, in order."""
        return [section.read(kv) for section in self.sections]


def page_table(pages: Sequence[int]) -> torch.Tensor:
    """Return the numbers of pages as int32 on the host. This goes through an array, which takes a
    seventh of the time that a tensor takes to read a list.
    """
    if not pages:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(array("i", pages), dtype=torch.int32)


def paged_span(
    first_row: int,
    num_rows: int,
    context: int,
    pages: Sequence[int] | torch.Tensor,
    kv_shape: torch.Size,
) -> PagedSpan:
    """Return the span for KV of `kv_shape` [pages, block_tokens, width]; pages: see `page_table`.

    Raises:
        ValueError: the pages do not cover the context, or one does not exist.
    """
    num_pages, block_tokens = kv_shape[0], kv_shape[1]
    needed = -(-context // block_tokens)
    if needed > len(pages):
        raise ValueError(f"{context} tokens need {needed} pages, the table has {len(pages)}")
    table = (pages if isinstance(pages, torch.Tensor) else page_table(pages))[:needed]
    least, most = table.aminmax()
    if least < 0 or most >= num_pages:
        raise ValueError(
            f"page table {tuple(table.tolist())} names a page outside 0..{num_pages - 1}"
        )
    return PagedSpan(first_row, num_rows, context, table, block_tokens)


def _sections(pages: list[int], context: int, block_tokens: int) -> list[Section]:
    runs = _runs(pages)
    sections: list[Section] = []
    loose: list[int] = []
    left = context

    def close() -> None:
        nonlocal left
        if loose:
            size = min(left, len(loose) * block_tokens)
            sections.append(Section(size, 0, torch.tensor(loose)))
            left -= size
            loose.clear()

    for first, length in runs:
        if length < _MIN_RUN_PAGES and len(runs) > 1:
            loose.extend(range(first, first + length))
            continue
        close()
        size = min(left, length * block_tokens)
        sections.append(Section(size, first * block_tokens, None))
        left -= size
    close()
    return sections


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
