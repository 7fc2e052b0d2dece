"""Joins attention over disjoint sets of keys (contract: `reference.merge`): context parallel ranks,
chunks of a cached prefix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import LN_2, LOG2_E, narrow, pow2


@triton.jit(do_not_specialize=["rows"])
def _merge(
    outs, lses, out, lse, rows, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    best = float("-inf")
    total = 0.0
    for part in tl.static_range(PARTS):
        at = part * rows.to(tl.int64) + row
        each = tl.load(lses + at) * LOG2_E
        new_best = tl.maximum(best, each)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(each - base)
        width = tl.where(weight > 0, WIDTH, 0)
        value = tl.load(outs + at * WIDTH + i, mask=i < width, other=0.0).to(tl.float32)
        shrink = tl.exp2(best - base)
        acc = acc * shrink + value * weight
        total = total * shrink + weight
        best = new_best
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    tl.store(out + row * WIDTH + i, narrow(acc / safe, out.dtype.element_ty), mask=i < WIDTH)
    tl.store(lse + row, tl.where(seen, (best + tl.log2(safe)) * LN_2, float("-inf")))


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, width], lse [rows, heads]) over all parts; see the reference."""
    parts, rows, heads, width = outs.shape
    out = torch.empty(rows, heads, width, dtype=outs.dtype, device=outs.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=outs.device)
    if rows:
        _merge[(rows * heads,)](
            outs.contiguous(), lses.contiguous(), out, lse, rows * heads,
            PARTS=parts, WIDTH=width, BLOCK=pow2(width), num_warps=4,
        )  # fmt: skip
    return out, lse
