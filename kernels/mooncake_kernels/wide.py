"""Dense products and attention in float32, whatever their inputs. They are for CPUs without
bfloat16 instructions, on which torch multiplies it eight times slower than float32 (Zen 3: 10 and
80 GFLOP/s per core). `reference.mla` and `reference.linear` define the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_kernels.native import build
from mooncake_kernels.reference import linear as reference
from mooncake_kernels.reference import mla
from mooncake_kernels.reference.paged import PagedSpan

_FEW_ROWS = 4
"""Fewer rows are multiplied directly, because widening the weight would take longer."""


def is_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies this dtype slower than float32, because the CPU lacks
    instructions.
    """
    return dtype == torch.bfloat16 and device.type == "cpu" and not build.has_bf16()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, [rows, out]. The weight takes no more memory between calls."""
    if x.shape[0] < _FEW_ROWS:
        return reference.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return reference.linear(x.float(), weight.float(), bias).to(x.dtype)


def linear_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return each head's `x @ weight.T`, [rows, heads, out]."""
    return reference.linear_heads(x.float(), weight.float()).to(x.dtype)


def mla_absorbed(
    q: torch.Tensor, kv: torch.Tensor, spans: Sequence[PagedSpan], rank: int
) -> torch.Tensor:
    """Return the attended latents, [rows, heads, rank]."""
    return mla.mla_absorbed(q.float(), kv, spans, rank).to(q.dtype)


def mla_expanded(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    key_up: torch.Tensor,
    value_up: torch.Tensor,
) -> torch.Tensor:
    """Return the attended values, [rows, heads, value width]."""
    found = mla.mla_expanded(q.float(), kv, spans, key_up.float(), value_up.float())
    return found.to(q.dtype)
