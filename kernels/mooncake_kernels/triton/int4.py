"""INT4 weights of grouped products in the order of wgmma's registers: their layout, and how they
are widened.

A step is 128 columns, and 64 rows of it are for one warpgroup. Of 16 columns a thread holds eight
numbers: rows r and r + 8 of its warp's 16, with r = lane // 4, and columns 2c, 2c + 1, 2c + 8 and
2c + 9, with c = lane % 4 (PTX, wgmma's fragment of A). Their codes are one word, and four words of
a thread are side by side. So a thread loads 16 bytes whose codes it multiplies itself, and nothing
moves between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from mooncake_kernels.reference.experts_quantized import int4_codes
from mooncake_kernels.triton.device import INTERPRETED

COLUMNS = 128
"""The columns of a step. A narrower last step is padded with zeros."""
_ROWS = 128
"""Rows are padded to whole blocks of this many, the most that a program takes."""
_GROUPS = 4
_ZERO_CODE = 8


@triton.jit
def _pairs(words, mask, SHIFT: tl.constexpr, x_dtype: tl.constexpr):
    """Return [..., 2] of words [...]: the codes `SHIFT` and 16 + `SHIFT` bits up; plus 128 in
    compiled bfloat16.
    """
    pair = (words >> SHIFT) & mask
    if x_dtype == tl.bfloat16 and not INTERPRETED:
        # 0x4300 is 128, whose last bit of mantissa is 1. So an `or` gives 128 + code exactly.
        pair = pair | 0x43004300
        low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.join(low, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:  # noqa: RET505 - only one branch is compiled, and Triton needs the `else` to see it
        return tl.join(pair & 15, pair >> 16).to(tl.float32)


@triton.jit
def _scale(packed, group: tl.constexpr):
    """Return the bfloat16 scale of one of the four groups that an int64 holds."""
    bits = (packed >> (16 * group)).to(tl.int16)
    if INTERPRETED:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def int4_tile(w, factors, first_row, k, N, x_dtype: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return weights [BLOCK_W, 128] of one matrix in `pack_int4`'s layout, from column `k` on.

    BLOCK_W: at most 128; 64 is a warpgroup's. The result is in x_dtype; interpreted, in float32.
    """
    tl.static_assert(BLOCK_W <= 128)  # of which `pack_int4` fills up whole blocks
    height = (N + 127) // 128 * 128
    thread = 2 * first_row + tl.arange(0, 2 * BLOCK_W)
    at = w + height.to(tl.int64) * (k // 8) + thread[None, :, None] * 4
    at += tl.arange(0, 2)[:, None, None] * (8 * height) + tl.arange(0, 4)[None, None, :]
    words = tl.load(at)
    # An instruction holds one constant of two. If the other were known, it would be moved to a
    # register before each instruction. N is positive.
    mask = 0x000F000F | (N >> 31)
    left = tl.join(_pairs(words, mask, 0, x_dtype), _pairs(words, mask, 4, x_dtype))
    right = tl.join(_pairs(words, mask, 8, x_dtype), _pairs(words, mask, 12, x_dtype))
    codes = tl.join(left, right).reshape([2, BLOCK_W // 16, 8, 4, 4, 2, 2, 2])
    codes = codes.permute([1, 6, 2, 0, 4, 7, 3, 5]).reshape([BLOCK_W, 4, 32])
    line = k // 128 * height + first_row + tl.arange(0, BLOCK_W)
    if factors.dtype.element_ty == tl.bfloat16:  # a row's four scales are one number
        packed = tl.load(factors.to(tl.pointer_type(tl.int64)) + line)
        even = tl.join(_scale(packed, 0), _scale(packed, 2))
        scales = tl.join(even, tl.join(_scale(packed, 1), _scale(packed, 3)))
        scales = scales.reshape([BLOCK_W, 4, 1])
    else:
        scales = tl.load(factors + line[:, None] * 4 + tl.arange(0, 4)[None, :])[:, :, None]
    if INTERPRETED:
        wide = (codes - 8.0) * scales
    elif x_dtype == tl.bfloat16:
        wide = (codes - 136.0) * scales
    else:
        wide = ((codes - 8.0) * scales).to(x_dtype)
    return wide.reshape([BLOCK_W, 128])


def pack_int4(words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (words [steps, 2, 2 * height, 4] int32, scales [steps, height, 4]) of one matrix.

    words: [rows, columns / 8] int32 and scales: [rows, columns / 32] as in the checkpoint. height:
    the rows with padding. Of a step's columns, first come 64, then 64; in each, the threads of all
    rows.
    """
    codes = int4_codes(words)
    rows, columns = codes.shape
    steps = triton.cdiv(columns, COLUMNS)
    more_rows = -rows % _ROWS
    codes = functional.pad(codes, (0, steps * COLUMNS - columns, 0, more_rows), value=_ZERO_CODE)
    scales = functional.pad(scales, (0, steps * _GROUPS - scales.shape[1], 0, more_rows))
    # Rows: (warp, half, r); columns: (step, 64 of it, 16 of them, half, c, one of two).
    halves = codes.view(-1, 2, 8, steps, 2, 4, 2, 4, 2)
    octets = halves[:, 0] | (halves[:, 1] << 4)
    made = octets.permute(2, 3, 0, 1, 6, 4, 7, 5).reshape(steps, 2, -1, 16).view(torch.int32)
    by_step = scales.view(-1, steps, _GROUPS).transpose(0, 1)
    return made, by_step.contiguous()


def pack_matrices(
    words: torch.Tensor, scales: torch.Tensor, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all matrices of `words` [..., rows, columns / 8] and `scales` in `pack_int4`'s layout,
    one after another, converted one at a time. If `in_place` and the given tensors have room for
    the padding, the result is in them.
    """
    words, scales = words.contiguous().flatten(0, -3), scales.contiguous().flatten(0, -3)
    (count, rows, _), groups = words.shape, scales.shape[-1]
    if in_place and not rows % _ROWS and not groups % _GROUPS:
        made = words, scales
    else:
        numbers = count * (rows + -rows % _ROWS) * (groups + -groups % _GROUPS)
        made = words.new_empty(count, 4 * numbers // count), scales.new_empty(numbers)
    packed, by_step = made[0].view(count, -1), made[1].view(count, -1)
    for matrix in range(count):
        new, new_scales = pack_int4(words[matrix], scales[matrix])
        packed[matrix], by_step[matrix] = new.flatten(), new_scales.flatten()
    return packed, by_step
