"""Linear layers of bfloat16 on the CPU with the weight kept in oneDNN's own blocked order.

The weight is repacked once at load and not in every call. So decode-size products read their
weights at memory speed (measured 1.4-1.6x over `functional.linear` at 1 to 16 rows).

oneDNN builds a primitive for every new shape (1 ms on a CPU with AVX-512, 7 with AMX), so rows are
padded to a ladder. Then the shapes are few and known, and can all be built before the first
request.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.nn import functional

_SMALL_RUNGS = (1, 2, 4, 8, 16, 32, 64)
_FINE_ROWS = 2048
"""Above this many rows the ladder is finer, because attention to long contexts is most of a step's
time.
"""
_ROWS_OF_A_PRODUCT = 24
"""How many rows could be multiplied in the time that one more product takes."""
MOST_ROWS_OF_PIECE = 256
"""The most rows of an expert that are multiplied at a time, so that there are no more shapes than
that.
"""


def _op(name: str) -> Any:
    # Torch gives these ops private names, and builds without oneDNN lack them.
    return getattr(torch.ops.mkldnn, name, None)


_linear = getattr(_op("_linear_pointwise"), "default", None)
_linear_binary = getattr(_op("_linear_pointwise"), "binary", None)
_reorder = _op("_reorder_linear_weight")
_bf16_supported = _op("_is_mkldnn_bf16_supported")


def supported(weight: torch.Tensor) -> bool:
    """Return whether a weight like `weight` can be packed on this machine."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    if _linear is None or _linear_binary is None or _reorder is None or _bf16_supported is None:
        return False
    return bool(_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] in oneDNN's order. The result is opaque and of the same size; only
    this module reads it.
    """
    packed: torch.Tensor = _reorder(weight.contiguous(), None)
    return packed


def address(packed: torch.Tensor) -> int:
    """Return the address of a packed weight's numbers."""
    found: int = _op("data_ptr")(packed)
    return found


def bytes_of(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a packed weight in their order in memory, flat."""
    return memory_of(packed).clone()


def memory_of(packed: torch.Tensor) -> torch.Tensor:
    """Return the same numbers without a copy. They are valid while `packed` lives."""
    size: int = _op("_nbytes")(packed)
    raw = (ctypes.c_char * size).from_address(address(packed))
    return torch.frombuffer(raw, dtype=torch.bfloat16)


def rung(rows: int) -> int:
    """Return the smallest number on the ladder that is at least `rows`, and at least 1.

    The ladder has powers of two up to 64, then steps of 64, from 512 on steps of a quarter of the
    power below, and from 2048 on of an eighth.
    """
    for small in _SMALL_RUNGS:
        if rows <= small:
            return small
    fraction = 3 if rows <= _FINE_ROWS else 4
    step = max(64, 1 << max(0, (rows - 1).bit_length() - fraction))
    return -(-rows // step) * step


def rungs(most_rows: int) -> list[int]:
    """Return the ladder up to the rung of `most_rows`."""
    made = [1]
    while made[-1] < most_rows:
        made.append(rung(made[-1] + 1))
    return made


@functools.cache
def pieces(rows: int) -> tuple[int, ...]:
    """Return rungs, each at most `MOST_ROWS_OF_PIECE`, that together hold `rows` rows.

    One more product costs a reading of the weight, and a padded row costs its multiplication. So
    rows are cut where that saves more padding than the product costs.
    """
    if rows <= 0:
        return ()
    padded = min(rung(rows), MOST_ROWS_OF_PIECE)
    whole = (padded, *pieces(rows - padded))
    if rows >= padded or padded == 1:
        return whole
    lower = max(step for step in rungs(padded) if step < padded)
    cut = (lower, *pieces(rows - lower))
    return min(whole, cut, key=lambda made: sum(made) + _ROWS_OF_A_PRODUCT * len(made))


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`; x: [rows, in] bfloat16."""
    assert _linear is not None
    rows = x.shape[0]
    out: torch.Tensor = _linear(padded(x), packed, bias, "none", [], "")
    return out[:rows] if out.shape[0] != rows else out


def linear_add(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor
) -> torch.Tensor:
    """Return `x @ weight.T + bias + add`, rounded once; add: [rows, out] bfloat16."""
    assert _linear_binary is not None
    rows = x.shape[0]
    out: torch.Tensor = _linear_binary(padded(x), padded(add), packed, bias, "add")
    return out[:rows] if out.shape[0] != rows else out


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, width], padded with zero rows up to the ladder's next rung."""
    rows = x.shape[0]
    missing = rung(rows) - rows
    return functional.pad(x, (0, 0, 0, missing)) if missing and rows else x
