"""The operations between the products of a step on the CPU, each in one call."""

from __future__ import annotations

import ctypes

import torch

from mooncake_kernels.native.packed import at, function
from mooncake_kernels.reference import kv_write as reference
from mooncake_kernels.reference import norm as norms
from mooncake_kernels.reference import router
from mooncake_kernels.reference.router import Routing

_FEW_ROWS = 32
"""Up to this many rows, the router's choice is one call. Above, torch's own sorting is faster."""


def kv_write(
    latent: torch.Tensor,
    key: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    kv: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Like the reference, which computes inputs that are not all bfloat16."""
    weight, eps = norm
    alike = {latent.dtype, key.dtype, weight.dtype, kv.dtype} == {torch.bfloat16}
    strided = latent.stride(0) == key.stride(0) and latent.stride(1) == key.stride(1) == 1
    if not (alike and strided and kv.is_contiguous() and kv_scale == 1.0):
        reference.kv_write(latent, key, rotation, places, norm, kv, kv_scale)
        return
    rotation = rotation.contiguous()
    function("kv_write_bf16")(
        at(latent), at(key), ctypes.c_int64(latent.stride(0)), at(rotation),
        at(places), at(weight), ctypes.c_double(eps), at(kv), latent.shape[0], latent.shape[1],
        key.shape[1], torch.get_num_threads(),
    )  # fmt: skip


def prepare_queries(q: torch.Tensor, rotation: torch.Tensor, scale: float) -> None:
    """Scale q [rows, heads, nope + rope], contiguous bfloat16, in place. Then rotate its last part
    by rotation [rows, rope / 2], as `reference.rope.rotate` does with interleaved pairs.
    """
    assert q.is_contiguous()
    assert q.dtype == torch.bfloat16
    rows, heads, width = q.shape
    rotation = rotation.contiguous()
    rope = 2 * rotation.shape[1]
    function("prepare_queries_bf16")(
        at(q), at(rotation), ctypes.c_double(scale), rows, heads, width - rope, rope,
        torch.get_num_threads(),
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Like the reference, which computes inputs that are not [rows, width] of bfloat16."""
    if x.dtype != torch.bfloat16 or weight.dtype != x.dtype or x.dim() != 2 or x.stride(1) != 1:
        return norms.rms_norm(x, weight, eps)
    rows, width = x.shape
    out = x.new_empty(rows, width)
    function("rms_norm_bf16")(
        at(x), ctypes.c_int64(x.stride(0)), at(weight), ctypes.c_double(eps), rows, width, at(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like the reference, which computes many rows, groups of experts and other dtypes."""
    (rows, hidden), num = x.shape, weight.shape[0]
    if rows > _FEW_ROWS or routing.num_groups > 1 or x.dtype != torch.bfloat16:
        return router.route(x, weight, bias, routing)
    x = x.contiguous()
    experts = torch.empty(rows, routing.top_k, dtype=torch.int64)
    floats = torch.empty(rows * (num + routing.top_k), dtype=torch.float32)
    logits, weights = floats[: rows * num], floats[rows * num :].view(rows, routing.top_k)
    function("route_bf16")(
        at(x), at(weight), at(bias), rows, hidden, num, routing.top_k, int(routing.normalize),
        ctypes.c_double(routing.scale), at(logits), at(experts), at(weights),
        torch.get_num_threads(),
    )  # fmt: skip
    return experts, weights
