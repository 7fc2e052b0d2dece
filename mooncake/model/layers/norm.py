"""The norm layer."""

from __future__ import annotations

import torch
from mooncake_kernels.dispatch import kernel


class RmsNorm:
    """Root-mean-square norm over the last axis; weight: [width] in the model's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._rms_norm = kernel("rms_norm")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed, in its shape and dtype."""
        normed: torch.Tensor = self._rms_norm(x, self._weight, self._eps)
        return normed
