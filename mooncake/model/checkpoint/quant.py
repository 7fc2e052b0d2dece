"""The two quantized weight formats of Kimi-K2, as functions on tensors. `quant_format` reads the
same formats from configurations.

FP8 (K2-Instruct, DeepSeek-V3) has e4m3 weights with one fp32 scale per 128 x 128 block. INT4
(K2-Thinking, compressed-tensors `pack-quantized`) has symmetric groups of 32 along the input, with
eight values in an int32 word. There are no files here: `weights` reads them. The `quantize_*` half
makes checkpoints in exactly these formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mooncake.model.checkpoint.quant_format import fp8_scale_shape

FP8_MAX = 448.0
"""The largest finite e4m3 number."""
_ROWS_AT_ONCE = 1024
"""How many rows are widened to fp32 at a time. This bounds the extra memory for dequantizing a
large tensor.
"""


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear weight as it is stored.

    kind "fp8": values e4m3 [out, in], factors [ceil(out / 128), ceil(in / 128)]. kind "int4":
    values int32 [out, in / 8], factors [out, in / 32].
    """

    kind: str
    values: torch.Tensor
    factors: torch.Tensor


def dequantize_fp8_block(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return `weight` [m, n] e4m3 times its blocks' `scale_inv` [ceil(m/bm), ceil(n/bn)].

    The product is taken in fp32 and rounded once to `dtype` (DeepSeek-V3's weight notes).
    """
    rows, columns = weight.shape
    if tuple(scale_inv.shape) != fp8_scale_shape((rows, columns), block):
        raise ValueError(f"scale of shape {tuple(scale_inv.shape)} for {rows}x{columns}, {block}")
    out = torch.empty(rows, columns, dtype=dtype)
    scales = scale_inv.float().repeat_interleave(block[1], dim=1)[:, :columns]
    step = max(1, _ROWS_AT_ONCE // block[0]) * block[0]
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        per_row = scales[begin // block[0] : math.ceil(end / block[0])]
        per_row = per_row.repeat_interleave(block[0], dim=0)[: end - begin]
        out[begin:end] = weight[begin:end].float().mul_(per_row)
    return out


def quantize_fp8_block(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [m, n], scale_inv fp32). Each block's largest magnitude maps to 448."""
    rows, columns = weight.shape
    grid = fp8_scale_shape((rows, columns), block)
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    largest = blocks.abs().amax(dim=(1, 3))
    scale_inv = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = (blocks / scale_inv[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    values = scaled.view(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale_inv


def dequantize_int4_packed(
    packed: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, int],
    group_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return the weight [m, k] of `packed` int32 [m, ceil(k/8)] and `scale` [m,
    ceil(k/group_size)].

    Word j of a row holds columns 8j to 8j+7, the lowest four bits first, each stored plus 8
    (compressed-tensors `pack_to_int32`). The group size is the number of columns per scale.
    """
    rows, columns = shape
    wanted = (rows, math.ceil(columns / 8)), (rows, math.ceil(columns / group_size))
    if (tuple(packed.shape), tuple(scale.shape)) != wanted:
        raise ValueError(f"packed {tuple(packed.shape)}, scale {tuple(scale.shape)} for {shape}")
    out = torch.empty(rows, columns, dtype=dtype)
    octets = packed.contiguous().view(torch.uint8)  # little-endian: low nibble of byte 0 first
    for begin in range(0, rows, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, rows)
        chunk = octets[begin:end]
        nibbles = torch.stack((chunk & 15, chunk >> 4), dim=-1).view(end - begin, -1)
        values = nibbles[:, :columns].float().sub_(8)
        wide = scale[begin:end].float().repeat_interleave(group_size, dim=1)[:, :columns]
        out[begin:end] = values.mul_(wide)
    return out


def quantize_int4_packed(
    weight: torch.Tensor, group_size: int = 32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (packed int32 [m, ceil(k/8)], scale bf16 [m, ceil(k/group)], shape int64 [2]).

    The codes are symmetric, -7 to 7, as in K2-Thinking's checkpoints. Values are rounded with the
    scale as it is stored (bf16).
    """
    rows, columns = weight.shape
    groups = math.ceil(columns / group_size)
    padded = torch.zeros(rows, groups * group_size)
    padded[:, :columns] = weight
    grouped = padded.view(rows, groups, group_size)
    largest = grouped.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / 7, 1.0).to(torch.bfloat16)
    codes = (grouped / scale.float()[..., None]).round_().clamp_(-7, 7).view(rows, -1)
    nibbles = torch.full((rows, 8 * math.ceil(columns / 8)), 8, dtype=torch.uint8)
    nibbles[:, :columns] = codes[:, :columns].add(8).to(torch.uint8)
    octets = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    packed = octets.contiguous().view(torch.int32)
    return packed, scale, torch.tensor([rows, columns], dtype=torch.int64)
