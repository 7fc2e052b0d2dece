"""Queries of absorbed attention in two launches (contract: `reference.queries`). Both parts are
scaled and written where attention reads them.
"""

from __future__ import annotations

import torch

from mooncake_kernels.triton.linear import linear_heads
from mooncake_kernels.triton.rope import rotate_into


def absorb_queries(
    q: torch.Tensor,
    rotation: torch.Tensor,
    key_up: torch.Tensor,
    scale: float,
    *,
    fixed: bool = False,
) -> torch.Tensor:
    """Return [rows, heads, rank + rope], contiguous; see the reference. fixed: see
    `linear.linear_heads`.
    """
    rows, heads, width = q.shape
    rank, nope = key_up.shape[1:]
    out = torch.empty(rows, heads, rank + width - nope, dtype=q.dtype, device=q.device)
    linear_heads(q[..., :nope], key_up, out[..., :rank], scale, fixed=fixed)
    rotate_into(q[..., nope:], rotation, out[..., rank:], scale)
    return out
