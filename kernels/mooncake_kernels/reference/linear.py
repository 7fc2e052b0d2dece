"""Dense products in the dtype of their inputs: of whole rows, and of each head's rows
separately.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, [rows, out]; x: [rows, in], weight: [out, in], bias: [out]."""
    return functional.linear(x, weight, bias)


def linear_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return each head's `x @ weight.T`, [rows, heads, out] (any strides).

    x: [rows, heads, in], may be a strided view; weight: [heads, out, in].
    """
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
