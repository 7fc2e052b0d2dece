"""Routed experts on the CPU: few tokens with one call of compiled code, many with oneDNN's
products.
"""

from __future__ import annotations

import ctypes
import math

import torch

from mooncake_kernels.native import build
from mooncake_kernels.native.measured import Experts, Kind, few_tokens, measured
from mooncake_kernels.native.packed import Quantized, at, blocked, function, reads_onednn
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.onednn.experts import PackedExperts


class Call:
    """One compiled function on the weights at `addresses`."""

    def __init__(self, name: str, addresses: list[int], num: int, hidden: int, inner: int) -> None:
        self.kind: Kind = name, num, hidden, inner
        self._function = function(name)
        self._addresses = (ctypes.c_uint64 * len(addresses))(*addresses)
        self._num, self._hidden, self._inner = num, hidden, inner

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `StackedExperts`. `add` [tokens, hidden] is added before the sum is rounded."""
        rows, choices = experts.shape
        add = None if add is None else add.contiguous()
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        assert (x.dtype, experts.dtype, weights.dtype) == (
            torch.bfloat16, torch.int64, torch.float32,
        )  # fmt: skip
        pairs = rows * choices
        out = torch.empty_like(x)
        sums = self._hidden * max(rows, -(-pairs // 2))  # or each pair's result in bfloat16
        room = torch.empty(pairs + sums, dtype=torch.float32)
        between = torch.empty(pairs, self._inner, dtype=x.dtype)
        self._function(
            at(x), at(experts), at(weights), rows, choices, self._num, self._hidden, self._inner,
            self._addresses, at(room), at(between), at(room[pairs:]),
            None if add is None else at(add), at(out), torch.get_num_threads(),
        )  # fmt: skip
        return out


class _Experts:
    """One layer's experts, computed in the faster way for each number of tokens."""

    def __init__(self, few: Call, many: Experts | None) -> None:
        self._few = few
        self._many = many
        self._few_tokens = math.inf if many is None else few_tokens(few.kind, few, many)

    @property
    def choice(self) -> str:
        """How many tokens are computed in which way, and why."""
        code = f"code compiled for {build.isa().name}"
        if self._many is None:
            return f"{code}, any number of tokens"
        last = measured(self._few.kind)[-1]
        times = (
            f"(measured with {last.tokens}: {1e3 * last.few_s:.1f} CPU ms a layer and "
            f"{1e3 * last.many_s:.1f} by oneDNN)"
        )
        if self._few_tokens == math.inf:
            return f"{code}, any number of tokens {times}"
        return f"{code} for up to {self._few_tokens} tokens, oneDNN for more {times}"

    def by_library(self, most_tokens: int) -> Experts | None:
        """Return the implementation for the experts of `most_tokens` tokens; None:
        compiled code.
        """
        return self._many if most_tokens > self._few_tokens else None

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `reference.experts`."""
        if not x.shape[0]:
            return torch.empty_like(x)
        if self._many is None or x.shape[0] <= self._few_tokens:
            return self._few(x, experts, weights)
        return self._many(x, experts, weights)


class PackedBf16Experts(_Experts):
    """Like `reference.experts.StackedExperts`, for bfloat16 only. Both ways use one packed copy of
    the weights. If oneDNN has no packed products of bfloat16, or packs in another order, there is
    only one way.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Raises CannotBuild when compiled code cannot run here, or not on these weights."""
        num, hidden, inner = down.shape
        _check_widths(hidden, inner)
        if down.dtype != torch.bfloat16:
            raise build.CannotBuild(f"experts of {down.dtype}")
        if reads_onednn(gate_up[0]) and reads_onednn(down[0]):
            many = PackedExperts(gate_up, down)
            addresses = [onednn.address(weight) for weight in many.packed]
        else:
            self._kept = [*map(blocked, gate_up), *map(blocked, down)]
            addresses, many = [kept.data_ptr() for kept in self._kept], None
        self._num, self._packed = num, many
        super().__init__(Call("experts_bf16", addresses, num, hidden, inner), many)

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        if self._packed is not None:
            return self._packed.slot(number)
        return [self._kept[number], self._kept[self._num + number]]


class _QuantizedExperts(_Experts):
    """Experts whose weights stay quantized in memory; x is bfloat16."""

    def __init__(
        self,
        kind: str,
        gate_up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        num, _, inner = gate_up[0].shape[:3]
        hidden = down[0].shape[1]
        _check_widths(hidden, inner)
        self.gate_up = Quantized(kind, *gate_up)
        self.down = Quantized(kind, *down)
        addresses = self.gate_up.addresses + self.down.addresses
        super().__init__(Call(f"experts_{kind}", addresses, num, hidden, inner), None)

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        both = slice(2 * number, 2 * number + 2)
        gate_up, down = self.gate_up, self.down
        return [gate_up.codes[both], gate_up.scales[both], down.codes[number], down.scales[number]]


class Int4Experts(_QuantizedExperts):
    """Like `reference.experts_quantized.Int4Experts`; x is bfloat16."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
    ) -> None:
        """Raises CannotBuild when compiled code cannot run here, or not on these widths."""
        super().__init__("int4", (gate_up, gate_up_scales), (down, down_scales))


class Fp8Experts(_QuantizedExperts):
    """Like `reference.experts_quantized.Fp8Experts`, for bfloat16 x, with one difference: x and the
    values between the products are multiplied without being quantized.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_factors: torch.Tensor,
        down: torch.Tensor,
        down_factors: torch.Tensor,
    ) -> None:
        """Raises CannotBuild when compiled code cannot run here, or not on these widths."""
        super().__init__("fp8", (gate_up, gate_up_factors), (down, down_factors))


def _check_widths(hidden: int, inner: int) -> None:
    if not build.fits(hidden, inner):
        raise build.CannotBuild(
            f"experts of widths {hidden} and {inner}, not multiples of {build.WIDTH}"
        )
