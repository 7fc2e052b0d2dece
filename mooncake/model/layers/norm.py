"""The norm layer."""

from __future__ import annotations

import torch

from mooncake.model.backends import Backends


class RmsNorm:
    """Root-mean-square norm over the last axis; weight: [width] in the model's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float, backends: Backends) -> None:
        self.weight = weight
        self.eps = eps
        self._rms_norm = backends.op("rms_norm")
        self._add_rms_norm = backends.op("add_rms_norm")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed, in its shape and dtype."""
        normed: torch.Tensor = self._rms_norm(x, self.weight, self.eps)
        return normed

    def of_sum(
        self, x: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (`x + update` normed, `x + update`), both [rows, width]. update: None adds
        nothing.
        """
        if update is None:
            return self(x), x
        normed, total = self._add_rms_norm(x, update, self.weight, self.eps)
        return normed, total
