"""Linear and gated layers that choose how to keep their weight. No weights are loaded here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from mooncake_kernels import wide
from mooncake_kernels.native import build, fixed, packed
from mooncake_kernels.native.linear import FewRows, FewRowsMlp, takes_all_rows
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated
from torch.nn import functional

from mooncake.model.parallel.group import Group

ALIKE_ROWS = 32
"""Up to this many rows, ranks use compiled code, whatever each of them would measure."""


class Product(Protocol):
    """A linear layer, however its weight is kept; x: [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] in x's dtype."""

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out], may be overwritten."""

    def prepare(self, rows: int, *, adding: bool = False) -> None:
        """Let a library that builds code for each shape build the code for `rows` rows. `adding`:
        for `add`.
        """


class Linear:
    """`y = x W^T + b`; weight: [out, in], bias: [out] or None; x: [rows, in] of the same dtype.

    bfloat16 on the CPU is packed for oneDNN or compiled code, and the given weight can then be
    freed. Every other kind keeps the tensor unchanged. `multiply` (contract: `reference.linear`)
    replaces either. `few`: the same product by compiled code, if that can read this weight, for few
    rows or all.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        multiply: Callable[..., torch.Tensor] | None = None,
        *,
        compiled: bool = False,
        alike: bool = False,
    ) -> None:
        """compiled: use compiled code if it can be built. alike: use it for equally many rows on
        all ranks, because their results must have the same bits; otherwise for as many as it was
        measured to be faster.
        """
        self.few: FewRows | None = None
        compiled = compiled and multiply is None and bias is None
        if compiled and takes_all_rows(weight):
            self.few = FewRows(weight, None)
            return
        self._packed = multiply is None and onednn.supported(weight)
        self._shape = weight.shape
        self._weight = onednn.pack(weight) if self._packed else weight
        self._bias = bias
        slow = wide.is_faster(weight.dtype, weight.device)
        self._multiply = multiply or (wide.linear if slow else functional.linear)
        self._adds_in_place = multiply is None and bias is None and not weight.is_cpu
        if compiled and self._packed:
            with contextlib.suppress(build.CannotBuild):
                self.few = FewRows(weight, self._weight, ALIKE_ROWS if alike else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]."""
        if self.few is not None and x.shape[0] <= self.few.most:
            return self.few(x)
        return self.by_library(x)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] in float32. Only a library rounds the sums."""
        if self.few is not None and x.shape[0] <= self.few.most:
            return self.few(x, wide=True)
        return self.by_library(x).float()

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] by the product for any number of rows."""
        if self._packed:
            return onednn.linear(x, self._weight, self._bias)
        return self._multiply(x, self._weight, self._bias)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`, in one pass if the backend can; to: [rows, out], may be
        overwritten.
        """
        if self.few is not None and x.shape[0] <= self.few.most:
            return self.few(x, to)
        if self._packed:
            return onednn.linear_add(x, self._weight, self._bias, to)
        if self._adds_in_place:
            return to.addmm_(x, self._weight.t())
        return self._multiply(x, self._weight, self._bias).add_(to)

    def prepare(self, rows: int, *, adding: bool = False) -> None:
        """See `Product`."""
        if self.few is not None and rows <= self.few.most:
            return
        if not self._packed:
            return
        outs, ins = self._shape
        x = torch.zeros(rows, ins, dtype=self._weight.dtype)
        if adding:
            self.add(x, x.new_zeros(rows, outs))
        else:
            self.by_library(x)


class Fp8Linear:
    """A product with a weight that stays FP8. `multiply` comes from `Backends.fp8_linear`."""

    def __init__(self, multiply: Callable[..., torch.Tensor]) -> None:
        self._multiply = multiply
        self.few = multiply if isinstance(multiply, packed.Fp8Linear) else None

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out]. The computation is the same for any number of rows."""
        return self(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] in x's dtype."""
        return self._multiply(x)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out], may be overwritten."""
        return self._multiply(x, to)

    def prepare(self, rows: int, *, adding: bool = False) -> None:
        """Do nothing, because no library multiplies here."""


class SummedProduct:
    """A product in which each rank of a group has some columns of the input. The ranks' results are
    summed.

    A tensor to add is added once, after the sum.
    """

    def __init__(self, product: Product, group: Group) -> None:
        self.product = product
        """The product of this rank's columns alone."""
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out], the same on all ranks."""
        return self.group.sum(self.product(x))

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out]."""
        return self(x).add_(to)

    def prepare(self, rows: int, *, adding: bool = False) -> None:
        """See `Product`. No other rank takes part."""
        del adding
        self.product.prepare(rows)


class SlabbedProduct:
    """A product whose sums are made of slabs of its columns, added by one tree. So they have the
    same bits however many ranks share out the columns. A tensor to add is added once, after the
    sum.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, slabs: int, group: Group
    ) -> None:
        """weight: [out, in], this rank's columns, which are `slabs` slabs. bias: the whole bias."""
        self._weight = weight
        self._bias = bias
        self._slabs = slabs
        self._group = group

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slabs of `x W^T`, [slabs, rows, out] float32."""
        return fixed.product(x, self._weight, self._slabs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out], the same on all ranks."""
        mine = [fixed.added(self.parts(piece)) for (piece,) in fixed.pieces(x)]
        total = self._group.sum(torch.cat(mine))
        return (total if self._bias is None else total + self._bias).to(x.dtype)

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + self(x)`; to: [rows, out]."""
        return self(x).add_(to)

    def prepare(self, rows: int, *, adding: bool = False) -> None:
        """Do nothing, because no library multiplies here."""


class GatedMlp:
    """`down(gated(gate_up x))`; gate_up makes [rows, 2 * inner], the gate first."""

    def __init__(
        self,
        gate_up: Product,
        down: Product,
        gated: Callable[[torch.Tensor], torch.Tensor] = gated,
    ) -> None:
        """`gated`: silu of the gate times the rest, like the reference."""
        self._gate_up = gate_up
        self._down = down
        self._gated = gated
        self._few = _few_rows(gate_up, down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `mlp(x)`, [rows, hidden]."""
        return self._down(self.inner(x))

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + mlp(x)`; x and to: [rows, hidden], `to` may be overwritten."""
        if self._few is not None and x.shape[0] <= self._few.most:
            return self._few(x, to)
        return self.add_inner(self.inner(x), to)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of `down`, [rows, inner]."""
        return self._gated(self._gate_up(x))

    def add_inner(self, inner: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + mlp(x)`, where `inner` was made from x; `to` may be overwritten."""
        return self._down.add(inner, to)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slabs of `mlp(x)`, for a layer that is made of slabs."""
        assert isinstance(self._down, SlabbedProduct)
        return self._down.parts(self.inner(x))

    def prepare(self, rows: int) -> None:
        """Let a library build its code for `add` with `rows` rows; see `Product`."""
        if self._few is None or rows > self._few.most:
            self._gate_up.prepare(rows)
            self._down.prepare(rows, adding=True)


def _few_rows(gate_up: Product, down: Product) -> FewRowsMlp | None:
    """Return the whole layer as one call of compiled code for few rows, if it can be built."""
    if not (isinstance(gate_up, Linear | Fp8Linear) and type(gate_up) is type(down)):
        return None
    if gate_up.few is None or down.few is None:
        return None
    with contextlib.suppress(build.CannotBuild):
        return FewRowsMlp(
            gate_up.few, down.few, lambda x: down.by_library(gated(gate_up.by_library(x)))
        )
    return None
