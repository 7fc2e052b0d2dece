"""Interleaved rotary embedding, and with it the write of a token's cached row (contracts:
`reference.rope`, `reference.kv_write`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference import rope as reference
from mooncake_kernels.triton.device import narrow, pow2


@triton.jit
def _turn(x, rotation, pairs, mask):
    """Return both numbers of each rotated pair of one row x, in float32."""
    first = tl.load(x + 2 * pairs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + 2 * pairs + 1, mask=mask, other=0.0).to(tl.float32)
    real = tl.load(rotation + 2 * pairs, mask=mask, other=0.0)
    imag = tl.load(rotation + 2 * pairs + 1, mask=mask, other=0.0)
    return first * real - second * imag, first * imag + second * real


@triton.jit
def _rotate(
    x, rotation, out, token_stride, head_stride, heads, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    first, second = _turn(
        x + token * token_stride + head * head_stride, rotation + token * 2 * HALF, pair, mask
    )
    row = out + (token * heads + head) * 2 * HALF
    tl.store(row + 2 * pair, narrow(first, out.dtype.element_ty), mask=mask)
    tl.store(row + 2 * pair + 1, narrow(second, out.dtype.element_ty), mask=mask)


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x rotated; see the reference. x may be a strided view; halves are left to torch."""
    if not interleaved or not x.shape[0]:
        return reference.rotate(x, rotation, interleaved)
    tokens, heads, width = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    _rotate[(tokens, heads)](
        x, torch.view_as_real(rotation), out, x.stride(0), x.stride(1), heads,
        HALF=width // 2, BLOCK=pow2(width // 2), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _kv_write(
    latent, key, rotation, places, weight, kv, latent_stride, key_stride, eps, inverse_scale,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place < 0:
        return
    out = kv + place * (RANK + 2 * HALF)
    i = tl.arange(0, BLOCK)
    there = i < RANK
    value = tl.load(latent + row * latent_stride + i, mask=there, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / RANK + eps)
    # Rounded where the separate operations round, so that both give the same cache.
    value = narrow(value * scale, weight.dtype.element_ty).to(tl.float32)
    value = value * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    value = narrow(value, weight.dtype.element_ty).to(tl.float32) * inverse_scale
    pair = tl.arange(0, BLOCK_H)
    mask = pair < HALF
    first, second = _turn(key + row * key_stride, rotation + row * 2 * HALF, pair, mask)
    first = narrow(first, weight.dtype.element_ty).to(tl.float32) * inverse_scale
    second = narrow(second, weight.dtype.element_ty).to(tl.float32) * inverse_scale
    if CLAMP:
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        first = tl.minimum(tl.maximum(first, -448.0), 448.0)
        second = tl.minimum(tl.maximum(second, -448.0), 448.0)
    tl.store(out + i, narrow(value, kv.dtype.element_ty), mask=there)
    tl.store(out + RANK + 2 * pair, narrow(first, kv.dtype.element_ty), mask=mask)
    tl.store(out + RANK + 2 * pair + 1, narrow(second, kv.dtype.element_ty), mask=mask)


def kv_write(
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Write each row's normed latent and rotated key part to its place; see the reference."""
    rows, rank = latent.shape
    half = key.shape[1] // 2
    if latent.stride(1) != 1 or key.stride(1) != 1 or not kv.is_contiguous():
        raise ValueError("columns of latent and key, and kv, must be contiguous")
    if not rows:
        return
    fp8 = kv.dtype == torch.float8_e4m3fn
    _kv_write[(rows,)](
        latent, key, torch.view_as_real(rotation), places, norm[0], kv,
        latent.stride(0), key.stride(0), norm[1], 1.0 / kv_scale if fp8 else 1.0,
        RANK=rank, HALF=half, BLOCK=pow2(rank), BLOCK_H=pow2(half), CLAMP=fp8, num_warps=2,
    )  # fmt: skip
