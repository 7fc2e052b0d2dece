"""A whole attention layer of few rows in one call: norms, products, the cached row, attention.

`mooncake.model.layers.mla` defines it, and computes the same with separate ops.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from mooncake_kernels.native import build
from mooncake_kernels.native.linear import FewRows
from mooncake_kernels.native.mla_decode import fits
from mooncake_kernels.native.packed import Fp8Linear, at, function
from mooncake_kernels.reference.paged_batch import PagedBatch

_WORD, _MOST_OUTS, _MOST_ROWS = 32, 1024, 64


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, bfloat16; norms are (weight, eps).

    query_kv_a, query_b, output: packed products without bias, of bfloat16 or FP8. query_b and
    query_norm: None when queries are not compressed. key_up: [heads, rank, nope]; value_up: [heads,
    value, rank]. scale: of the softmax; rope: the width of the rotated part, with its pairs side by
    side.
    """

    input_norm: tuple[torch.Tensor, float]
    query_kv_a: FewRows | Fp8Linear
    query_norm: tuple[torch.Tensor, float] | None
    query_b: FewRows | Fp8Linear | None
    kv_norm: tuple[torch.Tensor, float]
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: FewRows | Fp8Linear
    scale: float
    rope: int


class _Packed(ctypes.Structure):
    """The struct `Packed` of mla_decode.cpp."""

    _fields_ = [("values", ctypes.c_uint64), ("factors", ctypes.c_uint64)]


class _Layer(ctypes.Structure):
    """The struct `MlaLayer` of mla_decode.cpp."""

    _fields_ = [
        *((name, _Packed) for name in ("query_kv_a", "query_b", "output")),
        *((name, ctypes.c_uint64) for name in (
            "input_norm", "query_norm", "kv_norm", "key_up", "value_up",
        )),
        *((name, ctypes.c_double) for name in ("input_eps", "inner_eps", "scale")),
        *((name, ctypes.c_int32) for name in (
            "hidden", "query_rank", "heads", "nope", "rope", "rank", "value",
        )),
    ]  # fmt: skip


class MlaLayer:
    """`to + attention(norm(x))` for up to `most` rows, whose KV is written first."""

    def __init__(self, weights: LayerWeights) -> None:
        """Raises CannotBuild when compiled code cannot run here, or not on these widths."""
        w = weights
        heads, rank, nope = w.key_up.shape
        value, width = w.value_up.shape[1], rank + w.rope
        widths = (rank, nope, value, w.rope)
        if any(part % _WORD for part in widths) or value > _MOST_OUTS or heads % 8:
            raise build.CannotBuild(f"attention of {heads} heads and widths {widths}")
        products = [part for part in (w.query_kv_a, w.query_b, w.output) if part is not None]
        self.most = min(_MOST_ROWS, *(part.most for part in products))
        self._weights = w  # what the addresses below lie in
        self._heads, self._width, self._rank = heads, width, rank
        self._layer = _Layer(
            query_kv_a=_Packed(*w.query_kv_a.addresses),
            query_b=_Packed(*w.query_b.addresses) if w.query_b else _Packed(),
            output=_Packed(*w.output.addresses),
            input_norm=w.input_norm[0].data_ptr(),
            query_norm=w.query_norm[0].data_ptr() if w.query_norm else 0,
            kv_norm=w.kv_norm[0].data_ptr(),
            key_up=w.key_up.data_ptr(),
            value_up=w.value_up.data_ptr(),
            input_eps=w.input_norm[1],
            inner_eps=w.kv_norm[1],
            scale=w.scale,
            hidden=w.query_kv_a.ins,
            query_rank=w.query_kv_a.outs - width,
            heads=heads, nope=nope, rope=w.rope, rank=rank, value=value,
        )  # fmt: skip
        room = build.code().mla_layer_room
        room.restype = ctypes.c_int64
        self._room: int = room(ctypes.byref(self._layer))
        self._function = function("mla_layer_bf16")

    def takes(self, rows: int, pages: torch.Tensor) -> bool:
        """Whether this computes so many rows over such pages."""
        tokens = pages.shape[1]
        known = fits(self._heads, self._width, self._rank, tokens, pages.dtype)
        return 0 < rows <= self.most and known

    def __call__(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        places: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        to: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [rows, hidden].

        x: [rows, hidden]; rotation, places: of its rows, see `kv_write`; pages: [any, block_tokens,
        rank + rope]; batch: all rows, in host memory; to: [rows, hidden], None: nothing is added.
        """
        rows, threads = x.shape[0], torch.get_num_threads()
        each = max(self._layer.hidden, self._layer.query_rank)
        room = x.new_empty(rows * (self._room + threads * each))
        out = torch.empty_like(x)
        x = x.contiguous()
        to = None if to is None else to.contiguous()
        parts = (rotation.contiguous(), places, pages)
        of_batch = (batch.row_start, batch.lengths, batch.page_table)
        self._function(
            ctypes.byref(self._layer), at(x), None if to is None else at(to), *map(at, parts),
            pages.shape[1], *map(at, of_batch),
            batch.num_sequences, batch.page_table.shape[1], at(room), at(out), threads,
        )  # fmt: skip
        return out
