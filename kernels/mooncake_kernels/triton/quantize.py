"""Quantization of activations to e4m3 in groups of 128 columns (contract: `reference.fp8`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.fp8 import GROUP
from mooncake_kernels.triton.device import narrow, pow2

FP8_MAX = tl.constexpr(448.0)
_GROUPS_A_PROGRAM = 8


@triton.jit
def group_factors(x):
    """Return (values [groups, 128] within e4m3's range, factors [groups]) of float32 x."""
    largest = tl.max(tl.abs(x), 1)
    factors = tl.where(largest > 0, largest / FP8_MAX, 1.0)
    values = tl.minimum(tl.maximum(x / factors[:, None], -FP8_MAX), FP8_MAX)
    return values, factors


@triton.jit
def _quantize(x, values, factors, stride, width, groups, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    there = column < width
    wide = tl.load(x + row * stride + column, mask=there, other=0.0).to(tl.float32)
    scaled, factor = group_factors(wide)
    tl.store(values + row * width + column, narrow(scaled, tl.float8e4nv), mask=there)
    tl.store(factors + row * groups + group, factor, mask=group < groups)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [rows, width], factors float32 [rows, ceil(width / 128)]); see the reference."""
    rows, width = x.shape
    groups = triton.cdiv(width, GROUP)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    factors = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if x.stride(1) != 1:
        raise ValueError("the columns of x must be contiguous")
    each = min(_GROUPS_A_PROGRAM, pow2(groups))
    if rows:
        _quantize[(rows, triton.cdiv(groups, each))](
            x, values, factors, x.stride(0), width, groups, GROUPS=each, num_warps=4
        )
    return values, factors
