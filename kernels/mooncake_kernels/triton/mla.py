"""The absorbed form by spans (contract: `reference.mla.mla_absorbed`) on the decode kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_kernels.reference.paged import PagedSpan
from mooncake_kernels.reference.paged_batch import batch_of_spans
from mooncake_kernels.triton.mla_decode import mla_decode


def mla_absorbed(
    q: torch.Tensor, kv: torch.Tensor, spans: Sequence[PagedSpan], rank: int
) -> torch.Tensor:
    """Return the attended latents, [rows, heads, rank]; see the reference.

    Copies the page tables to the device: a captured step calls `mla_decode` with its own.
    """
    out, _ = mla_decode(q.contiguous(), kv, batch_of_spans(spans, q.device), rank)
    return out
