"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last axis.

    x: [..., width], any float dtype, the last axis contiguous; weight: [width] of the same dtype.
    The mean is taken in float32. The normed value is rounded to x's dtype before the weight is
    applied, as for DeepSeek-V3 in transformers.
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
