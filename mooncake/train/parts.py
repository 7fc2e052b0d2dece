"""Products and norms for training. Weights are float32; computation is in the dtype of the
input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Linear(nn.Module):
    """A product without bias; weight: [out, in] float32."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] in x's dtype."""
        return functional.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Root-mean-square norm over the last axis; weight: [width] float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed, in its dtype. The mean is taken in float32."""
        normed = functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)
        return normed.to(x.dtype)


class GatedMlp(nn.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden] in x's dtype."""
        made: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made
