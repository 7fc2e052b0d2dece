"""RMS norm, alone or with the residual sum (contracts: `reference.norm`, `reference.fused_norm`).
There is one program per row, because a row of 7168 numbers fits its registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import narrow, pow2


@triton.jit
def normed(value, weight, i, there, width, eps):
    """Return float32 `value` [BLOCK], zero where not `there`, normed and weighted.

    It is rounded to the weight's dtype where the separate operations round.
    """
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    rounded = narrow(value * scale, weight.dtype.element_ty).to(tl.float32)
    return rounded * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _norm(
    x, residual, weight, out, total, x_stride, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < width
    value = tl.load(x + row * x_stride + i, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * width + i, mask=there, other=0.0).to(tl.float32)
        rounded = narrow(value, total.dtype.element_ty)
        tl.store(total + row * width + i, rounded, mask=there)
        value = rounded.to(tl.float32)
    value = normed(value, weight, i, there, width, eps)
    tl.store(out + row * width + i, narrow(value, out.dtype.element_ty), mask=there)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm over the last axis; see the reference."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = pow2(width)
        _norm[(rows.shape[0],)](
            rows, rows, weight, out, out, rows.stride(0), width, eps,
            ADD=False, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of the sum, the sum); see the reference. x and residual are contiguous."""
    rows, width = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    if rows:
        block = pow2(width)
        _norm[(rows,)](
            x.contiguous(), residual.contiguous(), weight, out, total, width, width, eps,
            ADD=True, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, total
