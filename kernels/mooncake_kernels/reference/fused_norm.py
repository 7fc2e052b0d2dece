"""RMS norm together with the residual sum before it."""

from __future__ import annotations

import torch
from mooncake_kernels.reference.norm import rms_norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of the sum, the sum) of x and residual, [rows, width] in x's dtype.

    The sum is rounded to x's dtype before it is normed, so both outputs belong together.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
