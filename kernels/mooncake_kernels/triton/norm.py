"""RMS norm, alone, with the residual sum or quantized to e4m3 (contracts: `reference.norm`,
`reference.fused_norm`). One program a row: a row of 7168 numbers fits its registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.fp8 import GROUP
from mooncake_kernels.triton.device import narrow, pow2
from mooncake_kernels.triton.quantize import group_factors


@triton.jit
def _norm(
    x, residual, weight, out, total, factors, x_stride, width, groups, eps,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
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
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    normed = narrow(value * scale, weight.dtype.element_ty).to(tl.float32)
    normed = normed * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    if QUANTIZE:
        GROUPS: tl.constexpr = BLOCK // 128
        normed = narrow(normed, weight.dtype.element_ty).to(tl.float32)
        scaled, factor = group_factors(tl.reshape(normed, [GROUPS, 128]))
        g = tl.arange(0, GROUPS)
        tl.store(factors + row * groups + g, factor, mask=g < groups)
        scaled = tl.reshape(scaled, [BLOCK])
        tl.store(out + row * width + i, narrow(scaled, tl.float8e4nv), mask=there)
    else:
        tl.store(out + row * width + i, narrow(normed, out.dtype.element_ty), mask=there)


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
            rows, rows, weight, out, out, out, rows.stride(0), width, 0, eps,
            ADD=False, QUANTIZE=False, BLOCK=block, num_warps=_warps(block),
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
            x.contiguous(), residual.contiguous(), weight, out, total, out, width, width, 0, eps,
            ADD=True, QUANTIZE=False, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, total


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [rows, width], factors [rows, ceil(width / 128)]); see the reference."""
    rows, width = x.shape
    groups = triton.cdiv(width, GROUP)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    factors = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if rows:
        block = pow2(width, GROUP)
        _norm[(rows,)](
            x, x, weight, values, values, factors, x.stride(0), width, groups, eps,
            ADD=False, QUANTIZE=True, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return values, factors
