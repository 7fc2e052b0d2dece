"""Rotary position embedding as a product of complex numbers."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return `x` rotated by its position, in x's dtype; computed in float32.

    x: [tokens, heads, width] of any float dtype.
    rotation: [tokens, width / 2] complex64, `scale * (cos + i sin)` of each pair's angle.
    interleaved: pair j is (2j, 2j + 1), as in DeepSeek-V3 and Kimi-K2; else (j, j + width / 2).

    The order of the numbers is kept: a pair comes out where it went in. transformers instead
    returns interleaved input as two halves; scores agree because queries and keys are permuted
    alike, but cached keys do not, and this order is what our KV blocks hold.
    """
    turn = rotation[:, None]
    if interleaved:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)
