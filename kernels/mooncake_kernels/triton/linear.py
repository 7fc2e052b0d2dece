"""Dense products whose bits do not depend on the batch, and products of heads written into place
(contracts: `reference.linear`).

Libraries choose another kernel, and with it another order of summation, for another number of rows.
Here tiles and steps are the same for every shape, and no row is cut along the inner axis, so a
row's result depends on that row alone. This is slower, and used with `--deterministic`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import dot, narrow

_BLOCK_M = 64
_BLOCK_N = 64
_BLOCK_K = 64


@triton.jit(do_not_specialize=["M"])
def _fixed_linear(
    x, w, bias, out, M, N, K, x_row, x_head, out_row, out_head, scale,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + head * x_head + m.to(tl.int64)[:, None] * x_row
    w_rows = w + (head * N + n)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = first + k
        inside = (column < K)[None, :]
        a = tl.load(x_rows + column[None, :], mask=(m < M)[:, None] & inside, other=0.0)
        b = tl.load(w_rows + column[None, :], mask=(n < N)[:, None] & inside, other=0.0)
        acc = dot(a, tl.trans(b), acc)
    acc *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out + head * out_head + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(at, narrow(acc, out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return [rows, out]; see the reference. Rows of x may be strided, but not their numbers."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x[:, None], weight[None], bias, out[:, None], 1.0)
    return out


def linear_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float = 1.0,
    *,
    fixed: bool = False,
) -> torch.Tensor:
    """Return [rows, heads, out], times `scale`; see the reference. The result is contiguous, or in
    `out`, a view with any strides except the last, which must be 1. This takes one launch.

    fixed: use the product whose bits do not depend on the batch, instead of the library's.
    """
    if out is None:
        out = torch.empty(x.shape[0], *weight.shape[:2], dtype=x.dtype, device=x.device)
    if fixed:
        _launch(x, weight, None, out, scale)
    else:  # `out` is not read when beta is 0
        by_head = out.transpose(0, 1)
        by_head.baddbmm_(x.transpose(0, 1), weight.transpose(1, 2), beta=0, alpha=scale)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    rows, heads, width = x.shape
    if x.stride(2) != 1 and width > 1:
        x = x.contiguous()
    if not rows:
        return
    columns = weight.shape[1]
    grid = triton.cdiv(columns, _BLOCK_N), triton.cdiv(rows, _BLOCK_M), heads
    _fixed_linear[grid](
        x, weight.contiguous(), out if bias is None else bias, out, rows, columns, width,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), scale,
        BIAS=bias is not None, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
        STAGES=3, num_warps=4,
    )  # fmt: skip
