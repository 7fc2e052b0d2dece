"""A batch of query rows over paged KV, described on the device, so that the host knows no length.

A captured CUDA graph can be replayed with it: the tensors keep their place and shape, and only
their contents change. The reference reads them to the host and is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mooncake_kernels.reference.paged import PagedSpan, sent
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class PagedBatch:
    """Sequence s owns query rows `row_start[s]` to `row_start[s + 1]`, the last rows of its
    context.

    row_start: [seqs + 1] int32, ascending from 0. lengths: [seqs] int32, tokens of each context,
    including its query rows; 0 marks an unused place. page_table: [seqs, max_pages] int32; entries
    past a sequence's last page may hold anything. max_rows: the most rows that a sequence may have.
    plans: what kernels have computed from the tensors for all layers of a step. So a new batch is
    needed when the tensors' contents change.
    """

    row_start: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    max_rows: int
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]


def batch_of_spans(spans: Sequence[PagedSpan], device: torch.device) -> PagedBatch:
    """Return the batch of `spans`, which follow one another from row 0 on."""
    starts = [span.first_row for span in spans]
    ends = [span.first_row + span.num_rows for span in spans]
    if [*starts, ends[-1]] != [0, *ends]:
        raise ValueError(f"spans from rows {starts} to {ends} are not one after another from 0")
    table = pad_sequence([span.pages for span in spans], batch_first=True)
    lengths = [span.context for span in spans]
    return PagedBatch(
        row_start=sent(torch.tensor([0, *ends], dtype=torch.int32), device),
        lengths=sent(torch.tensor(lengths, dtype=torch.int32), device),
        page_table=sent(table, device),
        max_rows=max(span.num_rows for span in spans),
    )
