"""Linear and gated layers that choose how their weight is kept. No weights are loaded here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated
from torch.nn import functional

from mooncake.model.backends import Backends
from mooncake.model.parallel.group import Group


class Product(Protocol):
    """A linear layer, however its weight is kept; x: [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] in x's dtype."""

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out]."""


class Linear:
    """`y = x W^T + b`; weight: [out, in], bias: [out] or None; x: [rows, in] of the same dtype.

    bfloat16 on the CPU is packed for oneDNN (the given weight can then be freed); every other kind
    keeps the tensor as it is. `multiply` (contract: `reference.linear`) replaces either.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        multiply: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self._packed = multiply is None and onednn.supported(weight)
        self._weight = onednn.pack(weight) if self._packed else weight
        self._bias = bias
        self._multiply = multiply or functional.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        if self._packed:
            return onednn.linear(x, self._weight, self._bias)
        return self._multiply(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`, in one pass where the backend can; to: [rows, out]."""
        if self._packed:
            return onednn.linear_add(x, self._weight, self._bias, to)
        return self._multiply(x, self._weight, self._bias).add_(to)


class Fp8Linear:
    """`y = x W^T` of an e4m3 weight [out, in] with a factor for each 128 x 128 block.

    Rows of x are quantized in groups of 128 columns, as DeepSeek-V3 does (arXiv 2412.19437, 3.3).
    """

    def __init__(self, weight: torch.Tensor, factors: torch.Tensor, backends: Backends) -> None:
        self._weight = weight
        self._factors = factors
        self._quantize = backends.fp8_op("quantize_rows")
        self._multiply = backends.fp8_op("linear_fp8")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] in x's dtype."""
        made: torch.Tensor = self._multiply(
            *self._quantize(x.contiguous()), self._weight, self._factors
        )
        return made.to(x.dtype)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out]."""
        return self(x).add_(to)


class SummedProduct:
    """A product of whose input each rank of a group has columns: the ranks' results are summed.

    What is added is added once, after the sum.
    """

    def __init__(self, product: Product, group: Group) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out], the same on all ranks."""
        return self._group.sum(self._product(x))

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out]."""
        return self(x).add_(to)


class GatedMlp:
    """`down(silu(gate x) * up x)`; gate_up makes [rows, 2 * inner], the gate first."""

    def __init__(self, gate_up: Product, down: Product) -> None:
        self.gate_up = gate_up
        self.down = down

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + mlp(x)`; x and to: [rows, hidden]."""
        return self.down.add(gated(self.gate_up(x)), to)
