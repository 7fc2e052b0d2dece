"""Joins attention over disjoint sets of keys by their log-sum-exps."""

from __future__ import annotations

import torch


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, width] in outs' dtype, lse [rows, heads]) over all keys.

    outs: [parts, rows, heads, width]; lses: [parts, rows, heads] float32, -inf where a part saw no
    key (its out is not read and may be NaN). A row that saw no key in any part is 0 with lse -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.where(torch.isneginf(lses), 0.0, (lses - lse).exp())
    values = torch.where((weights > 0)[..., None], outs.float(), 0.0)
    return (values * weights[..., None]).sum(dim=0).to(outs.dtype), lse
