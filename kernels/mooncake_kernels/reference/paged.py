"""Rows of queries and the pages their keys lie in: what the attention ops are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MIN_RUN_PAGES = 4
"""Shorter runs of neighbouring pages are copied together; longer ones are read in place."""


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on `device`; a GPU's earlier work is not waited for."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True)
class Section:
    """Some tokens of a context in order: a slice of the flat KV, or pages to be copied out."""

    num_tokens: int
    begin: int
    pages: torch.Tensor | None

    def read(self, kv: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, width] of `kv` [pages, block_tokens, width]; a view if it can."""
        if self.pages is None:
            return kv.view(-1, kv.shape[-1])[self.begin : self.begin + self.num_tokens]
        if kv.dtype == torch.float8_e4m3fn:  # not every torch moves e4m3 by index
            pages = sent(self.pages, kv.device)
            copied = kv.view(torch.uint8).index_select(0, pages).view(kv.dtype)
        else:
            copied = kv.index_select(0, sent(self.pages, kv.device))
        return copied.view(-1, kv.shape[-1])[: self.num_tokens]


@dataclass(frozen=True)
class PagedSpan:
    """`num_rows` query rows from `first_row` on: the last tokens of a context of `context` tokens.

    Row i of the span sees the first `context - num_rows + 1 + i` keys. `pages` is the page table,
    `sections` the same as what to read.
    """

    first_row: int
    num_rows: int
    context: int
    pages: tuple[int, ...]
    sections: tuple[Section, ...]

    def keys(self, kv: torch.Tensor) -> list[torch.Tensor]:
        """Return the context's rows of `kv` [pages, block_tokens, width], in parts, in order."""
        return [section.read(kv) for section in self.sections]


def paged_span(
    first_row: int, num_rows: int, context: int, pages: Sequence[int], kv_shape: torch.Size
) -> PagedSpan:
    """Return the span for KV of `kv_shape` [pages, block_tokens, width].

    Raises:
        ValueError: the pages do not cover the context, or one is not there.
    """
    num_pages, block_tokens = kv_shape[0], kv_shape[1]
    needed = -(-context // block_tokens)
    if needed > len(pages):
        raise ValueError(f"{context} tokens need {needed} pages, the table has {len(pages)}")
    table = tuple(pages[:needed])
    if min(table) < 0 or max(table) >= num_pages:
        raise ValueError(f"page table {table} names a page outside 0..{num_pages - 1}")
    sections = tuple(_sections(table, context, block_tokens))
    return PagedSpan(first_row, num_rows, context, table, sections)


def _sections(pages: tuple[int, ...], context: int, block_tokens: int) -> list[Section]:
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


def _runs(pages: tuple[int, ...]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
