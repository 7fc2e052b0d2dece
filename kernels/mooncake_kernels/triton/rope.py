"""Interleaved rotary embedding (contract: `reference.rope`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference import rope as reference
from mooncake_kernels.triton.device import narrow, pow2

_HEADS_A_PROGRAM = 16


@triton.jit
def turned(x, rotation, pairs, mask, HALF: tl.constexpr):
    """Return both numbers of each rotated pair of rows x, in float32."""
    first = tl.load(x + 2 * pairs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + 2 * pairs + 1, mask=mask, other=0.0).to(tl.float32)
    real = tl.load(rotation + 2 * pairs, mask=pairs < HALF, other=0.0)
    imag = tl.load(rotation + 2 * pairs + 1, mask=pairs < HALF, other=0.0)
    return first * real - second * imag, first * imag + second * real


@triton.jit
def _rotate(
    x, rotation, out, x_token, x_head, out_token, out_head, heads, scale,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (pair < HALF)
    rows = x + token * x_token + head * x_head
    first, second = turned(rows, rotation + token * 2 * HALF, pair, mask, HALF)
    to = out + token * out_token + head * out_head + 2 * pair
    tl.store(to, narrow(first * scale, out.dtype.element_ty), mask=mask)
    tl.store(to + 1, narrow(second * scale, out.dtype.element_ty), mask=mask)


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x rotated; see the reference. x may be a strided view. torch computes pairs that are
    halves.
    """
    if not interleaved:
        return reference.rotate(x, rotation, interleaved)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate_into(x if x.stride(2) == 1 else x.contiguous(), rotation, out)
    return out


def rotate_into(
    x: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> None:
    """Write x rotated, with pairs interleaved, times `scale` to `out`. Both are [tokens, heads,
    width], with any strides except that of the width, which is 1.
    """
    tokens, heads, width = x.shape
    if not tokens:
        return
    each = min(_HEADS_A_PROGRAM, pow2(heads))
    _rotate[(tokens, triton.cdiv(heads, each))](
        x, torch.view_as_real(rotation), out,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), heads, scale,
        HALF=width // 2, HEADS=each, BLOCK=pow2(width // 2), num_warps=min(4, each),
    )  # fmt: skip
