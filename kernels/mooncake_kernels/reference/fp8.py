"""FP8 with block scales: e4m3 numbers, and a float32 factor for each block (DeepSeek-V3, section
3.3).
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
GROUP = 128
"""How many columns of an activation share a factor. Weights share one in blocks of 128 x 128."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [rows, width], factors float32 [rows, ceil(width / 128)]) of x [rows, width].

    The largest magnitude of each group of 128 columns becomes 448; a group of zeros has factor 1.
    """
    rows, width = x.shape
    groups = -(-width // GROUP)
    padded = torch.zeros(rows, groups * GROUP, dtype=torch.float32, device=x.device)
    padded[:, :width] = x
    grouped = padded.view(rows, groups, GROUP)
    largest = grouped.abs().amax(dim=-1)
    factors = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    values = (grouped / factors[..., None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)[:, :width]
    return values.to(torch.float8_e4m3fn).contiguous(), factors


def widen_rows(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of what `quantize_rows` made."""
    wide = factors.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]
    return values.float() * wide


def widen_blocks(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of weights [..., out, in] e4m3 with factors for each 128 x 128
    block.
    """
    rows = factors.repeat_interleave(GROUP, dim=-2)[..., : values.shape[-2], :]
    return values.float() * rows.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor,
    to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T`, [rows, out] in x's dtype, with x's rows quantized first; or `to + x @
    weight.T`, where `to` [rows, out] may be overwritten.

    x: [rows, in]; weight: [out, in] e4m3 with factors [ceil(out / 128), ceil(in / 128)]. Products
    are summed in float32.
    """
    product = widen_rows(*quantize_rows(x)) @ widen_blocks(weight, factors).t()
    return (product if to is None else product + to).to(x.dtype)
