"""Rotary position embedding in products of real numbers, each rounded. torch's complex products
differ in their last bit with a number's place in the tensor.
"""

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
    cosine, sine = torch.view_as_real(rotation)[:, None].unbind(-1)
    wide = x.float().contiguous()
    if interleaved:
        first, second = wide.view(*x.shape[:-1], -1, 2).unbind(-1)
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    whole = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return whole.to(x.dtype)
