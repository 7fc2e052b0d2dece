"""The write of a token's cached row, alone or in one launch with the norm of its query (contracts:
`reference.kv_write`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import narrow, pow2
from mooncake_kernels.triton.norm import normed
from mooncake_kernels.triton.rope import turned


@triton.jit
def _kv_write(
    latent, key, rotation, places, weight, kv, latent_stride, key_stride, eps, inverse_scale,
    query, query_weight, query_out, query_stride, query_width, query_eps,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """One program per row writes the cache. If there is a second one, it norms the query."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        q = tl.arange(0, BLOCK_Q)
        of_query = q < query_width
        value = tl.load(query + row * query_stride + q, mask=of_query, other=0.0).to(tl.float32)
        value = normed(value, query_weight, q, of_query, query_width, query_eps)
        value = narrow(value, query_out.dtype.element_ty)
        tl.store(query_out + row * query_width + q, value, mask=of_query)
        return
    place = tl.load(places + row)
    if place < 0:
        return
    out = kv + place * (RANK + 2 * HALF)
    i = tl.arange(0, BLOCK)
    there = i < RANK
    value = tl.load(latent + row * latent_stride + i, mask=there, other=0.0).to(tl.float32)
    value = normed(value, weight, i, there, RANK, eps)
    # It rounds where the separate operations round, so that both give the same cache.
    value = narrow(value, weight.dtype.element_ty).to(tl.float32) * inverse_scale
    pair = tl.arange(0, BLOCK_H)
    mask = pair < HALF
    first, second = turned(key + row * key_stride, rotation + row * 2 * HALF, pair, mask, HALF)
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
    _launch(latent, key, rotation, places, norm, kv, kv_scale, None)


def query_and_kv(
    query: torch.Tensor,
    query_norm: tuple[torch.Tensor, float],
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Return the normed query, and do what `kv_write` does; see the reference."""
    if query.stride(1) != 1:
        raise ValueError("columns of query must be contiguous")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(latent, key, rotation, places, norm, kv, kv_scale, (query, *query_norm, out))
    return out


def _launch(
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float,
    of_query: tuple[torch.Tensor, torch.Tensor, float, torch.Tensor] | None,
) -> None:
    """`of_query`: rows to be normed too, their norm's weight and eps, and where they go."""
    rows, rank = latent.shape
    half = key.shape[1] // 2
    if latent.stride(1) != 1 or key.stride(1) != 1 or not kv.is_contiguous():
        raise ValueError("columns of latent and key, and kv, must be contiguous")
    if not rows:
        return
    fp8 = kv.dtype == torch.float8_e4m3fn
    query, weight, eps, out = of_query or (latent, norm[0], norm[1], latent)
    _kv_write[(rows, 1 if of_query is None else 2)](
        latent, key, torch.view_as_real(rotation), places, norm[0], kv,
        latent.stride(0), key.stride(0), norm[1], 1.0 / kv_scale if fp8 else 1.0,
        query, weight, out, query.stride(0), query.shape[1], eps,
        RANK=rank, HALF=half, BLOCK=pow2(rank), BLOCK_H=pow2(half), BLOCK_Q=pow2(query.shape[1]),
        CLAMP=fp8, num_warps=2 if of_query is None else 4,
    )  # fmt: skip
