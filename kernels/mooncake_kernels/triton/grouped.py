"""Grouped matrix products over tiles of one expert each, for plain, FP8 block or INT4 weights.

`SWAP` makes weights the rows of the product and tokens its columns. wgmma needs 64 rows, and a
decode batch has these of weights, but not of tokens of one expert. Programs walk over all tiles,
whose number is read on the device, so the grid is the same for every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mooncake_kernels.triton.device import dot, narrow
from mooncake_kernels.triton.int4 import int4_tile

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT4 = tl.constexpr(2)


@triton.jit
def _dot(w, x, acc, SWAP: tl.constexpr):
    """Add the product of weights [n, k] and tokens [t, k] to acc, [n, t] if SWAP, else [t, n]."""
    if SWAP:
        return dot(w, tl.trans(x), acc)
    else:  # noqa: RET505
        return dot(x, tl.trans(w), acc)


@triton.jit
def _add(
    acc, x, x_factor, w, factors, first_row, k, N, K,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add one step of BLOCK_K columns from `k` on, and BLOCK_W rows, of `w` [N, K] to acc."""
    rows = first_row + tl.arange(0, BLOCK_W)
    live = rows < N
    if FORMAT == INT4:
        tile = int4_tile(w, factors, first_row, k, N, x.dtype, BLOCK_W)
        acc = _dot(tile, x, acc, SWAP)
    else:
        column = k + tl.arange(0, BLOCK_K)
        tile = tl.load(
            w + rows.to(tl.int64)[:, None] * K + column[None, :],
            mask=live[:, None] & (column < K)[None, :],
            other=0.0,
        )
        if FORMAT == FP8:
            # A tile lies in one block of 128 rows, so it has one factor.
            factor = tl.load(factors + first_row // 128 * ((K + 127) // 128) + k // 128)
            scale = x_factor * factor
            part = _dot(tile, x, tl.zeros(acc.shape, tl.float32), SWAP)
            acc += part * (scale[None, :] if SWAP else scale[:, None])
        else:
            acc = _dot(tile, x, acc, SWAP)
    return acc


@triton.jit
def _tokens(
    x, x_factors, x_rows, live, k, K,
    FORMAT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return (columns k on, factors for FP8) of some rows of x [., K]."""
    column = k + tl.arange(0, BLOCK_K)
    row = x + x_rows.to(tl.int64)[:, None] * K
    part = tl.load(row + column[None, :], mask=live[:, None] & (column < K)[None, :], other=0.0)
    factor = tl.zeros([BLOCK_T], tl.float32)
    if FORMAT == FP8:
        blocks = (K + 127) // 128
        factor = tl.load(x_factors + x_rows * blocks + k // 128, mask=live, other=0.0)
    return part, factor


@triton.jit
def place(index, num_tiles, blocks, GROUP_T: tl.constexpr):
    """Return (tile, block of weight rows). GROUP_T tiles use a block before the next is read."""
    group = index // (GROUP_T * blocks)
    first = group * GROUP_T
    size = tl.minimum(num_tiles - first, GROUP_T)
    inside = index % (GROUP_T * blocks)
    return first + inside % size, inside // size


@triton.jit
def _gate_up(
    x, x_factors, w, factors, order, tile_expert, tile_begin, tile_end, tile, block, first, last,
    N, K, matrix, matrix_factors, choices,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (gate x, up x) of a tile's rows and a block of weight rows, over columns `first` to
    `last`.
    """
    expert = tl.load(tile_expert + tile).to(tl.int64)
    row, live = tile_rows(tile_begin, tile_end, tile, BLOCK_T)
    token = tl.load(order + row, mask=live, other=0) // choices
    gate_w = w + expert * 2 * matrix
    gate_factors = factors + expert * 2 * matrix_factors
    if SWAP:
        gate = tl.zeros([BLOCK_W, BLOCK_T], tl.float32)
    else:
        gate = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    up = gate
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        part, factor = _tokens(x, x_factors, token, live, k, K, FORMAT, BLOCK_T, BLOCK_K)
        gate = _add(
            gate, part, factor, gate_w, gate_factors, block * BLOCK_W, k, N, K,
            FORMAT, SWAP, BLOCK_W, BLOCK_K,
        )  # fmt: skip
        up = _add(
            up, part, factor, gate_w + matrix, gate_factors + matrix_factors,
            block * BLOCK_W, k, N, K, FORMAT, SWAP, BLOCK_W, BLOCK_K,
        )  # fmt: skip
    return gate, up


@triton.jit
def tile_rows(tile_begin, tile_end, tile, BLOCK_T: tl.constexpr):
    """Return (the sorted rows of a tile, which of them exist)."""
    row = tl.load(tile_begin + tile) + tl.arange(0, BLOCK_T)
    return row, row < tl.load(tile_end + tile)


@triton.jit
def _store(result, out, row, live, first, N, SWAP: tl.constexpr, BLOCK_W: tl.constexpr):
    """Write a tile's product with weight rows `first` on to rows `row` of out [., N]."""
    n = first + tl.arange(0, BLOCK_W)
    row = row.to(tl.int64)
    if SWAP:
        at = row[None, :] * N + n[:, None]
        mask = live[None, :] & (n < N)[:, None]
    else:
        at = row[:, None] * N + n[None, :]
        mask = live[:, None] & (n < N)[None, :]
    tl.store(out + at, narrow(result, out.dtype.element_ty), mask=mask)


@triton.jit
def store_gated(gate, up, out, row, live, first, N, SWAP: tl.constexpr, BLOCK_W: tl.constexpr):
    """out[sorted row] = silu(gate) * up."""
    _store(gate / (1.0 + tl.exp(-gate)) * up, out, row, live, first, N, SWAP, BLOCK_W)


@triton.jit
def store_weighted(
    acc, out, order, pair_weights, row, live, first, N, SWAP: tl.constexpr, BLOCK_W: tl.constexpr
):
    """out[pair] = weight * acc."""
    pair = tl.load(order + row, mask=live, other=0).to(tl.int64)
    weight = tl.load(pair_weights + pair, mask=live, other=0.0)
    acc = acc * (weight[None, :] if SWAP else weight[:, None])
    _store(acc, out, pair, live, first, N, SWAP, BLOCK_W)


@triton.jit
def gate_up_kernel(
    x, x_factors, w, factors, out, order, tile_expert, tile_begin, tile_end, num_tiles,
    N, K, matrix, matrix_factors, choices,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[sorted row] = silu(gate x) * (up x) for each pair; w: [experts, 2, N, K].

    matrix, matrix_factors: elements of one [N, K] matrix and of its factors.
    """
    blocks = tl.cdiv(N, BLOCK_W)
    tiles = tl.load(num_tiles)
    for index in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP_T)
        gate, up = _gate_up(
            x, x_factors, w, factors, order, tile_expert, tile_begin, tile_end, tile, block, 0, K,
            N, K, matrix, matrix_factors, choices,
            FORMAT, SWAP, BLOCK_W, BLOCK_T, BLOCK_K, STAGES,
        )  # fmt: skip
        row, live = tile_rows(tile_begin, tile_end, tile, BLOCK_T)
        store_gated(gate, up, out, row, live, block * BLOCK_W, N, SWAP, BLOCK_W)


@triton.jit
def gate_up_ranges_kernel(
    x, x_factors, w, factors, out, order, tile_expert, tile_begin, tile_end, num_tiles,
    N, K, matrix, matrix_factors, choices, parts, arrived,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `gate_up_kernel`, for few tokens. Programs take equal ranges of the steps of all
    products, wherever products begin and end, so that few products keep all multiprocessors busy.

    A range begins and ends inside a product at most once each, so two slots per program hold all
    partial sums: parts [2 * programs, 2, tile] float32. `arrived` [products] int32 is zero before
    and after. The program that finds there that all steps of a product are done adds its parts in
    the programs' order, so the bits are always the same.
    """
    blocks = tl.cdiv(N, BLOCK_W)
    tiles = tl.load(num_tiles)
    steps = tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0)
    all_steps = tiles * blocks * steps
    each = tl.maximum(tl.cdiv(all_steps, tl.num_programs(0)), 1)
    start = program * each
    end = tl.minimum(start + each, all_steps)
    SIZE: tl.constexpr = BLOCK_W * BLOCK_T
    if SWAP:
        w_axis = tl.arange(0, BLOCK_W)[:, None]
        inside = w_axis * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    else:
        w_axis = tl.arange(0, BLOCK_W)[None, :]
        inside = tl.arange(0, BLOCK_T)[:, None] * BLOCK_W + w_axis
    # Addresses of the output are computed late. If they were kept during a product's steps, they
    # would be spilled.
    for index in tl.range(start // steps, tl.cdiv(end, steps), disable_licm=True):
        begin = index * steps
        first = tl.maximum(start - begin, 0)
        last = tl.minimum(end - begin, steps)
        tile, block = place(index, tiles, blocks, GROUP_T)
        gate, up = _gate_up(
            x, x_factors, w, factors, order, tile_expert, tile_begin, tile_end, tile, block,
            first * BLOCK_K, tl.minimum(last * BLOCK_K, K), N, K, matrix, matrix_factors, choices,
            FORMAT, SWAP, BLOCK_W, BLOCK_T, BLOCK_K, STAGES,
        )  # fmt: skip
        taken = last - first
        whole = taken == steps
        if taken < steps:
            slot = parts + (2 * program + (first == 0).to(tl.int32)).to(tl.int64) * 2 * SIZE
            tl.store(slot + inside, gate)
            tl.store(slot + SIZE + inside, up)
            tl.debug_barrier()  # all threads' stores come before what one thread says of them
            whole = tl.atomic_add(arrived + index, taken, sem="acq_rel") + taken == steps
            tl.debug_barrier()
            if whole:
                tl.store(arrived + index, 0)
                gate = tl.zeros(gate.shape, tl.float32)
                up = gate
                for other in range(begin // each, (begin + steps - 1) // each + 1):
                    head = (other * each <= begin).to(tl.int32)
                    slot = parts + (2 * other + head).to(tl.int64) * 2 * SIZE
                    gate += tl.load(slot + inside, cache_modifier=".cg")
                    up += tl.load(slot + SIZE + inside, cache_modifier=".cg")
        if whole:
            row, live = tile_rows(tile_begin, tile_end, tile, BLOCK_T)
            store_gated(gate, up, out, row, live, block * BLOCK_W, N, SWAP, BLOCK_W)


@triton.jit
def _down_step(
    acc, x, x_factors, row, live, w, factors, expert, matrix, matrix_factors, first_row, k, N, K,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add one step of BLOCK_K columns from `k` on to acc."""
    part, factor = _tokens(x, x_factors, row, live, k, K, FORMAT, BLOCK_T, BLOCK_K)
    return _add(
        acc, part, factor, w + expert * matrix, factors + expert * matrix_factors,
        first_row, k, N, K, FORMAT, SWAP, BLOCK_W, BLOCK_K,
    )  # fmt: skip


@triton.jit
def down_kernel(
    x, x_factors, w, factors, out, order, tile_expert, tile_begin, tile_end, num_tiles,
    N, K, matrix, matrix_factors, pair_weights,
    FORMAT: tl.constexpr, SWAP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """out[pair] = weight * (down x[sorted row]); w: [experts, N, K].

    STEPS: how many steps of BLOCK_K columns make up K, unrolled in the code; 0: in a loop.
    """
    blocks = tl.cdiv(N, BLOCK_W)
    tiles = tl.load(num_tiles)
    for index in range(tl.program_id(0), tiles * blocks, tl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP_T)
        expert = tl.load(tile_expert + tile).to(tl.int64)
        row, live = tile_rows(tile_begin, tile_end, tile, BLOCK_T)
        if SWAP:
            acc = tl.zeros([BLOCK_W, BLOCK_T], tl.float32)
        else:
            acc = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
        if STEPS:
            for step in tl.static_range(STEPS):
                acc = _down_step(
                    acc, x, x_factors, row, live, w, factors, expert, matrix, matrix_factors,
                    block * BLOCK_W, step * BLOCK_K, N, K,
                    FORMAT, SWAP, BLOCK_W, BLOCK_T, BLOCK_K,
                )  # fmt: skip
        else:
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                acc = _down_step(
                    acc, x, x_factors, row, live, w, factors, expert, matrix, matrix_factors,
                    block * BLOCK_W, k, N, K, FORMAT, SWAP, BLOCK_W, BLOCK_T, BLOCK_K,
                )  # fmt: skip
        store_weighted(acc, out, order, pair_weights, row, live, block * BLOCK_W, N, SWAP, BLOCK_W)


@triton.jit
def sum_kernel(parts, experts, out, num_experts, N, CHOICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[token] = the sum of its pairs' parts by choice. Experts of other ranks add nothing."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        expert = tl.load(experts + pair).to(tl.int32)
        limit = tl.where((expert >= 0) & (expert < num_experts), N, 0)
        acc += tl.load(parts + pair * N + n, mask=n < limit, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, narrow(acc, out.dtype.element_ty), mask=n < N)
