"""Weights in the order in which compiled code reads them, and products with them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from mooncake_kernels.native import build
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.fp8 import GROUP as FP8_BLOCK


def function(name: str) -> Callable[..., None]:
    """Return a compiled function without a result. Raises CannotBuild when there is no compiled
    code.
    """
    found: Callable[..., None] = getattr(build.code(), name)
    found.restype = None  # type: ignore[attr-defined]
    return found


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's first number."""
    return ctypes.c_void_p(tensor.data_ptr())


def block_outs() -> int:
    """Return how many outs a block has."""
    return int(build.code().outs_of_a_block())


def blocked(weight: torch.Tensor) -> torch.Tensor:
    """Return [..., outs, ins] in the order in which compiled code reads bfloat16: [..., outs /
    each, ins / 2, each, 2], with so many outs together as oneDNN has on such a CPU.
    """
    *lead, outs, ins = weight.shape
    each = int(build.code().outs_together())
    return weight.view(*lead, outs // each, each, ins // 2, 2).transpose(-3, -2).contiguous()


_read: dict[tuple[build.Isa, int, int], bool] = {}


def reads_onednn(weight: torch.Tensor) -> bool:
    """Return whether compiled code reads a bfloat16 weight [outs, ins] in the order in which oneDNN
    packs this shape here. On CPUs without bfloat16 it never should: oneDNN, which emulates it,
    would have a third of its speed with many rows.
    """
    outs, ins = weight.shape
    isa = build.isa()
    if isa is build.AVX2 or not build.fits(outs) or ins % 32:
        return False
    if (isa, outs, ins) not in _read:
        packed = onednn.bytes_of(onednn.pack(weight))
        _read[isa, outs, ins] = torch.equal(packed, blocked(weight.contiguous()).flatten())
    return _read[isa, outs, ins]


class Quantized:
    """Weights of one shape that stay quantized, in the order in which compiled code reads them.

    codes: uint8; int4 has two codes in each. scales: for int4 bfloat16, one for each group of 32
    ins of each out; for fp8 float32, one for each group of 128 ins of a block of outs.
    """

    def __init__(self, kind: str, values: torch.Tensor, factors: torch.Tensor) -> None:
        """kind "fp8": values e4m3 [..., outs, ins], factors [..., ceil(outs / 128), ceil(ins /
        128)]; "int4": values int32 [..., outs, ins / 8], factors [..., outs, ins / 32].

        Raises:
            CannotBuild: compiled code cannot run here, or not on these widths.
        """
        *lead, outs, columns = values.shape
        ins = 8 * columns if kind == "int4" else columns
        if not build.fits(outs, ins):
            raise build.CannotBuild(
                f"weights of widths {outs} and {ins}, not multiples of {build.WIDTH}"
            )
        stored = values.contiguous().view(torch.uint8)
        num = math.prod(lead)
        self.codes = torch.empty(num, stored.numel() // num, dtype=torch.uint8)
        function(f"pack_{kind}")(
            at(stored), ctypes.c_int64(num * outs), ins, at(self.codes), torch.get_num_threads(),
        )  # fmt: skip
        ordered = _int4_scales(factors) if kind == "int4" else _fp8_factors(factors, outs)
        self.scales = ordered.reshape(num, -1)

    @property
    def addresses(self) -> list[int]:
        """The addresses of the codes and of the scales."""
        return [self.codes.data_ptr(), self.scales.data_ptr()]


def _int4_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [..., outs, groups] as [..., blocks of outs, groups, outs of a block]."""
    *lead, outs, groups = scales.shape
    each = block_outs()
    cut = scales.to(torch.bfloat16).reshape(*lead, outs // each, each, groups)
    return cut.transpose(-2, -1).contiguous()


def _fp8_factors(factors: torch.Tensor, outs: int) -> torch.Tensor:
    """Return factors [..., ceil(outs / 128), groups] as [..., blocks of outs, groups]."""
    each = block_outs()
    return factors.float().index_select(-2, torch.arange(outs // each) * each // FP8_BLOCK)


class Fp8Linear:
    """`x W^T` of an e4m3 weight [outs, ins] with a factor for each 128 x 128 block; x: [rows, ins]
    bfloat16, which is not quantized.
    """

    most = math.inf

    def __init__(self, weight: torch.Tensor, factors: torch.Tensor) -> None:
        """Raises CannotBuild when compiled code cannot run here, or not on these widths."""
        self._weight = Quantized("fp8", weight, factors)
        self._multiply = function("linear_fp8")
        self.outs, self.ins = weight.shape
        self.addresses = self._weight.addresses

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, outs] bfloat16. `add`, of that shape, is added before they are rounded."""
        rows = x.shape[0]
        x, add = x.contiguous(), None if add is None else add.contiguous()
        out = x.new_empty(rows, self.outs)
        codes, scales = (ctypes.c_void_p(address) for address in self.addresses)
        self._multiply(
            at(x), rows, self.outs, self.ins, codes, scales, None if add is None else at(add),
            at(out), torch.get_num_threads(),
        )  # fmt: skip
        return out
