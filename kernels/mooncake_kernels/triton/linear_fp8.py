"""Dense products of FP8 block weights (contract: `reference.fp8.linear_fp8`).

Each step of 128 columns is one product of its own, scaled and added in float32. The factors need
this, and it keeps Hopper's short FP8 accumulator from carrying over long sums. With few rows the
operands are swapped, so that weights fill wgmma's 64 rows. The fewest rows are quantized where they
are multiplied: every tile repeats that, which costs less than a launch. Tiles are walked in groups
for reuse in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.fp8 import GROUP
from mooncake_kernels.triton.device import dot, narrow, num_programs
from mooncake_kernels.triton.quantize import group_factors, quantize_rows

_FEW_ROWS = (16, 32, 64)
_QUANTIZED_INSIDE = 32
"""Up to this many rows, that work is hidden behind the reading of the weights. A step of 16 rows is
306 instructions instead of 151, and memory has its bytes there in about 440.
"""


@triton.jit(do_not_specialize=["M"])
def _linear(
    x, x_factors, w, factors, out, M, N, K,
    SWAP: tl.constexpr, QUANTIZE: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, 128)
    j = tl.arange(0, 128)
    for index in range(tl.program_id(0), blocks_m * blocks_n, tl.num_programs(0)):
        first = index // (GROUP_M * blocks_n) * GROUP_M
        size = tl.minimum(blocks_m - first, GROUP_M)
        inside = index % (GROUP_M * blocks_n)
        m = (first + inside % size) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = inside // size * BLOCK_N + tl.arange(0, BLOCK_N)
        x_row = x + m.to(tl.int64)[:, None] * K
        w_row = w + n.to(tl.int64)[:, None] * K
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            column = (step * 128 + j)[None, :]
            a = tl.load(x_row + column, mask=(m < M)[:, None] & (column < K), other=0.0)
            b = tl.load(w_row + column, mask=(n < N)[:, None] & (column < K), other=0.0)
            if QUANTIZE:
                wide, of_row = group_factors(a.to(tl.float32))
                a = narrow(wide, tl.float8e4nv)
            else:
                of_row = tl.load(x_factors + m * steps + step, mask=m < M, other=0.0)
            # A tile lies in one block of 128 rows of weights, so it has one factor.
            scale = of_row * tl.load(factors + inside // size * BLOCK_N // 128 * steps + step)
            zero = tl.zeros(acc.shape, tl.float32)
            if SWAP:
                acc += dot(b, tl.trans(a), zero) * scale[None, :]
            else:
                acc += dot(a, tl.trans(b), zero) * scale[:, None]
        if SWAP:
            at = m.to(tl.int64)[None, :] * N + n[:, None]
            mask = (m < M)[None, :] & (n < N)[:, None]
        else:
            at = m.to(tl.int64)[:, None] * N + n[None, :]
            mask = (m < M)[:, None] & (n < N)[None, :]
        if ADD:
            acc += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, narrow(acc, out.dtype.element_ty), mask=mask)


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
    to: torch.Tensor | None = None,
    *,
    fixed_tiles: bool = False,
) -> torch.Tensor:
    """Return `x @ weight.T`, [rows, out], or add it to `to` in place; see the reference. All
    tensors are contiguous.

    fixed_tiles: a row's bits do not depend on how many rows there are.
    """
    rows, width = x.shape
    columns, steps = weight.shape[0], triton.cdiv(width, GROUP)
    if weight.shape[1] != width or factors.shape[1] != steps:
        raise ValueError(
            f"a weight of {tuple(weight.shape)} with factors of {tuple(factors.shape)} for rows of "
            f"{width} columns"
        )
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if to is None else to
    if not rows:
        return out
    few = rows <= _FEW_ROWS[-1] and not fixed_tiles
    inside = few and rows <= _QUANTIZED_INSIDE
    values, of_rows = (x, factors) if inside else quantize_rows(x)
    block_m = next((size for size in _FEW_ROWS if few and rows <= size), 128)
    block_n = 64 if few else 128
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
    _linear[(min(tiles, num_programs(x.device) * (3 if few else 1)),)](
        values, of_rows, weight, factors, out, rows, columns, width,
        SWAP=few, QUANTIZE=inside, ADD=to is not None, BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=8,
        STAGES=4, num_warps=4 if few else 8,
    )  # fmt: skip
    return out
