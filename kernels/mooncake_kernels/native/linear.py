"""Products of few rows with weights that oneDNN packed: compiled code reads them in place, at the
speed of memory. Many rows go to oneDNN, see `measured`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from mooncake_kernels.native import build
from mooncake_kernels.native.experts import Call
from mooncake_kernels.native.measured import few_tokens
from mooncake_kernels.native.packed import at, blocked, function
from mooncake_kernels.onednn import linear as onednn

MOST_ROWS = 64


_read: dict[tuple[int, int], bool] = {}


def _readable(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether oneDNN packs weights of this shape in the order that compiled code reads."""
    outs, ins = weight.shape
    if build.isa() is not build.AVX512 or not build.fits(outs) or ins % 32:
        return False
    if (outs, ins) not in _read:
        same = torch.equal(onednn.bytes_of(packed), blocked(weight.contiguous()).flatten())
        _read[outs, ins] = same
    return _read[outs, ins]


class FewRows:
    """`x @ weight.T` for up to `most` rows; the weight stays with who packed it."""

    def __init__(self, weight: torch.Tensor, packed: torch.Tensor, most: int | None = None) -> None:
        """most: up to how many rows, if it need not be the faster way; None: it is measured.

        Raises CannotBuild: compiled code cannot run here, or not on this weight.
        """
        self._multiply = function("linear_bf16")
        if not _readable(weight, packed):
            raise build.CannotBuild(f"a weight of {tuple(weight.shape)} is packed in another order")
        self.outs, self.ins = weight.shape
        self.address = onednn.address(packed)
        self.most = most or few_tokens(
            ("linear_bf16", 1, self.ins, self.outs),
            lambda x, *_: self(x),
            lambda x, *_: onednn.linear(x, packed, None),
            most=MOST_ROWS,
        )

    def __call__(
        self, x: torch.Tensor, add: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        """Return [rows, outs], `add` [rows, outs] added before rounding; wide: in float32, of which
        nothing was rounded, and without `add`.
        """
        assert x.dtype == torch.bfloat16
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.outs, dtype=torch.float32 if wide else x.dtype)
        add = None if add is None else add.contiguous()
        self._multiply(
            at(x), ctypes.c_int64(x.stride(0)), rows, self.outs, self.ins,
            ctypes.c_void_p(self.address), None if add is None else at(add), at(out), int(wide),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


class FewRowsMlp:
    """`to + down(silu(gate x) * up x)` for up to `most` rows: an expert that all tokens choose."""

    def __init__(self, gate_up: FewRows, down: FewRows, many: Callable[..., torch.Tensor]) -> None:
        """many: (x) -> down(silu(gate x) * up x), for any number of rows.

        Raises CannotBuild: the widths are not multiples of 64.
        """
        hidden, inner = gate_up.ins, down.ins
        if not build.fits(hidden, inner):
            raise build.CannotBuild(
                f"a layer of widths {hidden} and {inner}, not multiples of {build.WIDTH}"
            )
        addresses = [gate_up.address, down.address]
        self._call = Call("experts_bf16", addresses, 1, hidden, inner)
        self._first = torch.zeros(MOST_ROWS, 1, dtype=torch.int64)
        self._whole = torch.ones(MOST_ROWS, 1)
        self.most = few_tokens(self._call.kind, self._call, lambda x, *_: many(x), most=MOST_ROWS)

    def __call__(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        return self._call(x, self._first[:rows], self._whole[:rows], to)
