"""Grouped products of FP8 blocks for many rows of an expert. Descriptors fetch their tiles.

Triton's own warp specialization (`warp_specialize=True`) stays off: with Triton 3.6 on an H200 it
made both products wrong, and without it they were right.

Rows are in sorted order, so that a tile of them is one box of memory. Their factors have columns
first, so that those of a step are side by side. Each step of 128 columns is a product of its own,
scaled and added in float32, as in `linear_fp8`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import dot
from mooncake_kernels.triton.grouped import place, store_gated, store_weighted


@triton.jit
def _product(
    index, tiles, blocks, tile_expert, tile_begin, tile_end,
    GROUP_T: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return (expert, block of weight rows, first sorted row, all rows, which of them exist)."""
    tile, block = place(index, tiles, blocks, GROUP_T)
    begin = tl.load(tile_begin + tile)
    row = begin + tl.arange(0, BLOCK_T)
    return tl.load(tile_expert + tile), block, begin, row, row < tl.load(tile_end + tile)


@triton.jit
def gate_up_fp8_kernel(
    x, x_factors, w, factors, out, tile_expert, tile_begin, tile_end, num_tiles,
    rows, matrices, N, K,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[sorted row] = silu(gate x) * (up x); x: [rows, K], w: [experts, 2, N, K], [matrices, N,
    K] in all; x_factors: [steps, rows].
    """
    blocks = tl.cdiv(N, BLOCK_W)
    steps = tl.cdiv(K, 128)
    of_matrix = tl.cdiv(N, 128) * steps
    tiles = tl.load(num_tiles)
    x_boxes = tl.make_tensor_descriptor(x, [rows, K], [K, 1], [BLOCK_T, 128])
    w_boxes = tl.make_tensor_descriptor(w, [matrices * N, K], [K, 1], [BLOCK_W, 128])
    for index in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        expert, block, begin, row, live = _product(
            index, tiles, blocks, tile_expert, tile_begin, tile_end, GROUP_T, BLOCK_T
        )
        line = expert * 2 * N + block * BLOCK_W
        of_block = factors + expert.to(tl.int64) * 2 * of_matrix + block * BLOCK_W // 128 * steps
        gate = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            a = x_boxes.load([begin, step * 128])
            b = w_boxes.load([line, step * 128])
            c = w_boxes.load([line + N, step * 128])
            of_row = tl.load(x_factors + step * rows + row, mask=live, other=0.0)
            zero = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
            gate += dot(a, tl.trans(b), zero) * (of_row * tl.load(of_block + step))[:, None]
            of_up = tl.load(of_block + of_matrix + step)
            up += dot(a, tl.trans(c), zero) * (of_row * of_up)[:, None]
        store_gated(gate, up, out, row, live, block * BLOCK_W, N, False, BLOCK_W)


@triton.jit
def down_fp8_kernel(
    x, x_factors, w, factors, out, order, pair_weights, tile_expert, tile_begin, tile_end,
    num_tiles, rows, matrices, N, K,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[pair] = weight * (down x[sorted row]); x: [rows, K], w: [matrices, N, K]."""
    blocks = tl.cdiv(N, BLOCK_W)
    steps = tl.cdiv(K, 128)
    tiles = tl.load(num_tiles)
    x_boxes = tl.make_tensor_descriptor(x, [rows, K], [K, 1], [BLOCK_T, 128])
    w_boxes = tl.make_tensor_descriptor(w, [matrices * N, K], [K, 1], [BLOCK_W, 128])
    for index in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        expert, block, begin, row, live = _product(
            index, tiles, blocks, tile_expert, tile_begin, tile_end, GROUP_T, BLOCK_T
        )
        line = expert * N + block * BLOCK_W
        of_block = (
            factors + (expert.to(tl.int64) * tl.cdiv(N, 128) + block * BLOCK_W // 128) * steps
        )
        acc = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            a = x_boxes.load([begin, step * 128])
            b = w_boxes.load([line, step * 128])
            of_row = tl.load(x_factors + step * rows + row, mask=live, other=0.0)
            zero = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
            acc += dot(a, tl.trans(b), zero) * (of_row * tl.load(of_block + step))[:, None]
        store_weighted(acc, out, order, pair_weights, row, live, block * BLOCK_W, N, False, BLOCK_W)


def allocate(size: int, alignment: int, stream: Any) -> torch.Tensor:
    """Return memory for the descriptors that a kernel makes. Triton calls this at a launch."""
    del alignment, stream  # torch's memory is aligned to 512 bytes, and of the current stream
    return torch.empty(size, dtype=torch.int8, device="cuda")
