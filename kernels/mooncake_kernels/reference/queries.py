"""Queries of absorbed attention, made from the output of a layer's product."""

from __future__ import annotations

import torch
from mooncake_kernels.reference.linear import linear_heads
from mooncake_kernels.reference.rope import rotate


def absorb_queries(
    q: torch.Tensor, rotation: torch.Tensor, key_up: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return `scale * [key_up q_nope | rotate(q_rope)]`, [rows, heads, rank + rope].

    q: [rows, heads, nope + rope], pairs interleaved; rotation: [rows, rope / 2] complex64; key_up:
    [heads, rank, nope].
    """
    nope = key_up.shape[2]
    latent = linear_heads(q[..., :nope] * scale, key_up)
    turned = rotate(q[..., nope:] * scale, rotation, interleaved=True)
    return torch.cat((latent, turned), dim=-1)
