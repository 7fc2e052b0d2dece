"""Linear and gated layers that choose how their weight is kept. No weights are loaded here."""

from __future__ import annotations

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated
from torch.nn import functional


class Linear:
    """`y = x W^T + b`; weight: [out, in], bias: [out] or None; x: [rows, in] of the same dtype.

    bfloat16 on the CPU is packed for oneDNN (the given weight can then be freed); every other kind
    keeps the tensor as it is.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = onednn.supported(weight)
        self._weight = onednn.pack(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        if self._packed:
            return onednn.linear(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`, in one pass where the backend can; to: [rows, out]."""
        if self._packed:
            return onednn.linear_add(x, self._weight, self._bias, to)
        return functional.linear(x, self._weight, self._bias).add_(to)


class GatedMlp:
    """`down(silu(gate x) * up x)`; gate_up: [2 * inner, hidden], down: [hidden, inner]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = Linear(gate_up)
        self._down = Linear(down)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + mlp(x)`; x and to: [rows, hidden]."""
        return self._down.add(gated(self._gate_up(x)), to)
