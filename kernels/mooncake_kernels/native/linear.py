"""Dense products by compiled code, with few rows at the speed of memory.

Weights that oneDNN packed are read in place. `measured` decides how many rows go to oneDNN. If
oneDNN only emulates bfloat16, has none, or packs in another order, compiled code keeps its own copy
and takes any number of rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from mooncake_kernels.native import build
from mooncake_kernels.native.experts import Call
from mooncake_kernels.native.measured import few_tokens
from mooncake_kernels.native.packed import Fp8Linear, at, blocked, function, reads_onednn
from mooncake_kernels.onednn import linear as onednn


def takes_all_rows(weight: torch.Tensor) -> bool:
    """Whether compiled code alone should compute products with `weight`. It should for bfloat16
    weights that it cannot read as oneDNN packs them; see `packed.reads_onednn`.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    return build.why_not() is None and build.fits(*weight.shape) and not reads_onednn(weight)


class FewRows:
    """`x @ weight.T` for up to `most` rows."""

    def __init__(
        self, weight: torch.Tensor, packed: torch.Tensor | None, most: int | None = None
    ) -> None:
        """packed: oneDNN's copy, whose maker keeps it; None: this makes its own copy, and takes any
        number of rows. most: the largest number of rows, even if this is not faster; None: it is
        measured.

        Raises:
            CannotBuild: compiled code cannot run here, or not on this weight.
        """
        self._multiply = function("linear_bf16")
        self.outs, self.ins = weight.shape
        if packed is None:
            self._kept = blocked(weight.contiguous())
            self.addresses, self.most = [self._kept.data_ptr()], math.inf
            return
        if not reads_onednn(weight):
            raise build.CannotBuild(f"a weight of {tuple(weight.shape)} is packed in another order")
        self.addresses = [onednn.address(packed)]
        self.most = most or few_tokens(
            ("linear_bf16", 1, self.ins, self.outs),
            lambda x, *_: self(x),
            lambda x, *_: onednn.linear(x, packed, None),
        )

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        """Return [rows, outs]. `add` [rows, outs] is added before rounding. wide: in float32,
        without rounding and without `add`.
        """
        assert x.dtype == torch.bfloat16
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.outs, dtype=torch.float32 if wide else x.dtype)
        add = None if add is None else add.contiguous()
        values = ctypes.c_void_p(self.addresses[0])
        self._multiply(
            at(x), ctypes.c_int64(x.stride(0)), rows, self.outs, self.ins, values,
            None if add is None else at(add), at(out), int(wide), torch.get_num_threads(),
        )  # fmt: skip
        return out


class FewRowsMlp:
    """`to + down(silu(gate x) * up x)` for up to `most` rows: an expert that all tokens choose."""

    def __init__(
        self,
        gate_up: FewRows | Fp8Linear,
        down: FewRows | Fp8Linear,
        many: Callable[..., torch.Tensor],
    ) -> None:
        """gate_up and down: of one kind. many: (x) -> down(silu(gate x) * up x), for any number of
        rows.

        Raises:
            CannotBuild: the widths are not multiples of 64.
        """
        hidden, inner = gate_up.ins, down.ins
        if not build.fits(hidden, inner):
            raise build.CannotBuild(
                f"a layer of widths {hidden} and {inner}, not multiples of {build.WIDTH}"
            )
        name = "experts_fp8" if isinstance(down, Fp8Linear) else "experts_bf16"
        self._of = gate_up, down  # what the addresses lie in
        self._call = Call(name, gate_up.addresses + down.addresses, 1, hidden, inner)
        self._first, self._whole = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        self.most = min(gate_up.most, down.most)
        if self.most != math.inf:
            self.most = few_tokens(self._call.kind, self._call, lambda x, *_: many(x))

    def __call__(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows > self._first.shape[0]:
            self._first, self._whole = self._first.new_zeros(rows, 1), self._whole.new_ones(rows, 1)
        return self._call(x, self._first[:rows], self._whole[:rows], to)
