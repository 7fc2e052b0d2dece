"""RMS norm together with what stands beside it in a layer: the residual sum and quantization."""

from __future__ import annotations

import torch
from mooncake_kernels.reference.fp8 import quantize_rows
from mooncake_kernels.reference.norm import rms_norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of the sum, the sum) of x and residual, [rows, width] in x's dtype.

    The sum is rounded to x's dtype before it is normed, so both outputs belong together.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x quantized in groups of 128 columns; see `fp8.quantize_rows`."""
    return quantize_rows(rms_norm(x, weight, eps))
