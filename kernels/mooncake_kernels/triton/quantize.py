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
def _quantize(
    x, order, values, factors, stride, width, groups, row_stride, group_stride, choices,
    GROUPS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Row i of values is the row of pair order[i] if ORDERED, else row i."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if ORDERED:
        source = (tl.load(order + row) // choices).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    there = column < width
    wide = tl.load(x + source * stride + column, mask=there, other=0.0).to(tl.float32)
    scaled, factor = group_factors(wide)
    tl.store(values + row * width + column, narrow(scaled, tl.float8e4nv), mask=there)
    at = factors + row * row_stride + group.to(tl.int64) * group_stride
    tl.store(at, factor, mask=group < groups)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [rows, width], factors float32 [rows, ceil(width / 128)]); see the reference."""
    rows, width = x.shape
    groups = triton.cdiv(width, GROUP)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    factors = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    _launch(x, None, 1, values, factors)
    return values, factors


def quantize_pairs(
    x: torch.Tensor, order: torch.Tensor | None, choices: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [pairs, width], factors float32 [groups, pairs]) of the rows that `order`
    [pairs] int32 names; a pair is token * choices + choice. With `order` None: of all rows.
    """
    pairs, width = x.shape[0] if order is None else order.shape[0], x.shape[1]
    values = torch.empty(pairs, width, dtype=torch.float8_e4m3fn, device=x.device)
    groups = triton.cdiv(width, GROUP)
    factors = torch.empty(groups, pairs, dtype=torch.float32, device=x.device)
    _launch(x, order, choices, values, factors.t())
    return values, factors


def _launch(
    x: torch.Tensor,
    order: torch.Tensor | None,
    choices: int,
    values: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """`factors`: [rows, groups], of any strides."""
    rows, width = values.shape
    if x.stride(1) != 1:
        raise ValueError("the columns of x must be contiguous")
    groups = factors.shape[1]
    each = min(_GROUPS_A_PROGRAM, pow2(groups))
    if rows:
        _quantize[(rows, triton.cdiv(groups, each))](
            x, values if order is None else order, values, factors, x.stride(0), width, groups,
            factors.stride(0), factors.stride(1), choices,
            GROUPS=each, ORDERED=order is not None, num_warps=4,
        )  # fmt: skip
