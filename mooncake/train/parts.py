"""Products and norms for training. Weights are float32; computation is in the dtype of the
input.
"""

from __future__ import annotations

from typing import Any

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

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return x [rows, width] normed, in `dtype` or its own. The mean is taken in float32."""
        made: torch.Tensor = _Normed.apply(x, self.weight, self._eps, dtype or x.dtype)  # type: ignore[no-untyped-call]
        return made


class _Normed(torch.autograd.Function):
    """The norm in fewer passes over memory than torch's own, which a CPU composes of many."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        wide = x.float()
        norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = (norms.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        made: torch.Tensor = (wide * inverse).mul_(weight).to(dtype)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        product = gradient * normed
        of_weight = product.sum(dim=0)
        mean = (product @ weight)[:, None] / x.shape[-1]
        made = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return made.to(x.dtype), of_weight, None, None


class _Spread(torch.autograd.Function):
    """See `spread`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.places, ctx.number = places, len(rows)
        return rows.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found = gradient.index_select(0, ctx.places)
        if len(found) != ctx.number:
            found = found.view(ctx.number, -1, found.shape[1]).sum(dim=1)
        return found, None, None


class _Gathered(torch.autograd.Function):
    """See `gathered`."""

    @staticmethod
    def forward(ctx: Any, placed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.places, ctx.number = places, len(placed)
        return placed.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        placed = gradient.new_zeros(ctx.number, gradient.shape[1])
        return placed.index_copy_(0, ctx.places, gradient), None


def spread(rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return rows [number, width] in places: [places, width], where `sources` says which row.

    places: [number * copies] int64; where the copies of each row stand. The values elsewhere are
    padding and have no gradient.
    """
    made: torch.Tensor = _Spread.apply(rows, sources, places)  # type: ignore[no-untyped-call]
    return made


def gathered(placed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows at `places`, which are distinct."""
    made: torch.Tensor = _Gathered.apply(placed, places)  # type: ignore[no-untyped-call]
    return made


class _Joined(torch.autograd.Function):
    """See `joined`."""

    @staticmethod
    def forward(
        ctx: Any, placed: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.sources, ctx.dtype = sources, placed.dtype
        parts = placed.index_select(0, places).view(-1, copies, placed.shape[1])
        return parts.sum(dim=1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient.to(ctx.dtype).index_select(0, ctx.sources), None, None, None


def joined(
    placed: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, copies: int
) -> torch.Tensor:
    """Return the sum of each row's `copies`, which `spread` put in places: [number, width] float32.

    The values elsewhere repeat a row and would add to its gradient, so give them no weight before.
    """
    made: torch.Tensor = _Joined.apply(placed, sources, places, copies)  # type: ignore[no-untyped-call]
    return made


class _Products(torch.autograd.Function):
    """See `products`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrices: torch.Tensor, sizes: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.sizes = sizes
        made = x.new_empty(len(x), matrices.shape[1])
        parts = zip(torch.split(x, sizes), matrices, torch.split(made, sizes), strict=True)
        for part, matrix, out in parts:
            torch.mm(part, matrix.mT, out=out)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, matrices = ctx.saved_tensors
        of_x, of_matrices = torch.empty_like(x), torch.empty_like(matrices)
        rows = (torch.split(each, ctx.sizes) for each in (gradient, x, of_x))
        for own, part, out, matrix, of_matrix in zip(*rows, matrices, of_matrices, strict=True):
            torch.mm(own, matrix, out=out)
            torch.mm(own.mT, part, out=of_matrix)
        return of_x, of_matrices, None


def products(x: torch.Tensor, matrices: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the product of each matrix with its rows of x: [rows, out].

    matrices: [number, out, in]. sizes: how many rows each has, one after the other.
    """
    made: torch.Tensor = _Products.apply(x, matrices, sizes)  # type: ignore[no-untyped-call]
    return made


class _Gated(torch.autograd.Function):
    """See `gated`."""

    @staticmethod
    def forward(ctx: Any, wide: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(wide, shares)
        gate, up = wide.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up).mul_(shares[:, None].to(wide.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide, shares = ctx.saved_tensors
        gate, up = wide.chunk(2, dim=-1)
        made = torch.empty_like(wide)
        of_gate, of_up = made.chunk(2, dim=-1)
        opened = functional.silu(gate)
        torch.mul(gradient, opened, out=of_up)
        of_shares = (of_up * up).sum(dim=-1, dtype=shares.dtype)
        weighted = gradient * shares[:, None].to(gradient.dtype)
        torch.mul(weighted, opened, out=of_up)
        torch.ops.aten.silu_backward(weighted.mul_(up), gate, grad_input=of_gate)
        return made, of_shares


def gated(wide: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up * share` for wide [rows, 2 * inner], gates and then ups, in wide's
    dtype. shares: [rows] float32.
    """
    made: torch.Tensor = _Gated.apply(wide, shares)  # type: ignore[no-untyped-call]
    return made


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
