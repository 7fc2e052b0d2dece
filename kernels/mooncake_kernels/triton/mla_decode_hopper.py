"""`mla_decode._attend` for sm_90, written in Gluon, which states what each warp holds.

Two warpgroups share a tile of 64 rows. Each computes the scores of half of a page's tokens. The
weights go through shared memory, and each multiplies all of them with half of the latent's columns,
so that a thread holds 128 sums and nothing is spilled. Shared memory holds two pages: while one is
computed, the next arrives by asynchronous copies, which fill with zeros after the context's end. A
cache in FP8 arrives unchanged and is widened from there into the place that the products read.

`mla_decode._warpgroups_are_faster` says where it is served.

Rows are always 64; with fewer, the rest is computed for nothing, because decode waits for memory.
The order of sums differs from `_attend`'s. Contract, schedule, slots and the merge are the same.
Source of the two warpgroups that share scores: FlashMLA's description of its kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
PAGE, RANK, ROPE, WARPS = 64, 512, 64, 8
"""The sizes for which the layouts below are made."""

# Triton 3.6 has both under other names.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
if hasattr(async_copy, "async_load"):
    async_load = async_copy.async_load
else:
    async_load = async_copy.async_copy_global_to_shared


@gluon.jit
def _find(ends, value, num, BLOCK: gl.constexpr):
    """Return how many of the ascending `ends` [num] are at most `value`."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = 0
    for begin in range(0, num, BLOCK):
        i = begin + gl.arange(0, BLOCK, layout=LINE)
        end = gl.load(ends + i, mask=i < num, other=2147483647)
        found += gl.sum((end <= value).to(gl.int32), 0)
    return found


@gluon.jit
def _fetch(
    kv, table, block, stop, length, latent, rope,
    RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Begin to copy page `block` of a context, with zeros for what follows its end or `stop`."""
    LINE: gl.constexpr = ROPE // EACH  # threads side by side, so that few addresses are held
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, EACH], [32 // LINE, LINE], [gl.num_warps(), 1], [1, 0]
    )
    page = gl.load(table + block, mask=block < stop, other=0).to(gl.int64)
    n = gl.arange(0, PAGE, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY))
    r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY))
    live = ((block < stop) & (block * PAGE + n < length))[:, None]
    row = kv + (page * PAGE + n)[:, None] * (RANK + ROPE)
    async_load(latent, row + c[None, :], mask=live)
    async_load(rope, row + (RANK + r)[None, :], mask=live)
    async_copy.commit_group()


@gluon.jit
def _fetch_queries(
    q, row0, tile, num_rows, q_latent, q_rope,
    RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile of (token, head) rows, with zeros after the last."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY))
    r = gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY))
    row = q + (row0 + m).to(gl.int64)[:, None] * (RANK + ROPE)
    async_load(q_latent, row + c[None, :], mask=(m < num_rows)[:, None])
    async_load(q_rope, row + (RANK + r)[None, :], mask=(m < num_rows)[:, None])


@gluon.jit(do_not_specialize=["num_seqs", "table_stride"])
def attend_warpgroups(
    q, kv, page_table, row_start, lengths, first_unit, first_tile, part_out, part_lse, out, lse,
    num_seqs, heads, table_stride, kv_scale,
    RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_S: gl.constexpr, FIXED_PAGES: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Attend over a range of units, like `mla_decode._attend`. EACH: how many numbers of kv 16
    bytes hold.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, PAGE // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PIECE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    WIDTH: gl.constexpr = FIXED_PAGES if FIXED_PAGES > 0 else 1
    STEP: gl.constexpr = 128
    dtype: gl.constexpr = q.dtype.element_ty
    WIDENS: gl.constexpr = kv.dtype.element_ty != dtype
    STORED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0]) if WIDENS else SHARED
    q_latent = gl.allocate_shared_memory(dtype, [BLOCK_M, RANK], SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE], SHARED)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_M, PAGE], SHARED)
    latents = gl.allocate_shared_memory(kv.dtype.element_ty, [2, PAGE, RANK], STORED)
    ropes = gl.allocate_shared_memory(kv.dtype.element_ty, [2, PAGE, ROPE], STORED)
    if WIDENS:
        wide_latent = gl.allocate_shared_memory(dtype, [PAGE, RANK], SHARED)
        wide_rope = gl.allocate_shared_memory(dtype, [PAGE, ROPE], SHARED)

    program = gl.program_id(0)
    all_units = gl.load(first_unit + num_seqs)
    each = (all_units + gl.num_programs(0) - 1) // gl.num_programs(0)
    unit = program * each
    end = gl.minimum(unit + each, all_units)
    while unit < end:
        seq = _find(first_unit + 1, unit, num_seqs, BLOCK_S)
        row0 = gl.load(row_start + seq) * heads
        num_rows = gl.load(row_start + seq + 1) * heads - row0
        length = gl.load(lengths + seq)
        units = (length + PAGE * WIDTH - 1) // (PAGE * WIDTH)
        inside = unit - gl.load(first_unit + seq)
        tile = gl.load(first_tile + seq) + inside // units
        begin = inside % units
        stop = begin + 1 if FIXED_PAGES > 0 else gl.minimum(begin + end - unit, units)
        table = page_table + seq.to(gl.int64) * table_stride
        first = begin * WIDTH
        last = gl.minimum(stop * WIDTH, (length + PAGE - 1) // PAGE)

        _fetch_queries(q, row0, tile, num_rows, q_latent, q_rope, RANK, ROPE, BLOCK_M)
        for ahead in gl.static_range(2):
            _fetch(
                kv, table, first + ahead, last, length, latents.index(ahead), ropes.index(ahead),
                RANK, ROPE, PAGE, EACH,
            )  # fmt: skip
        m = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
        limit = length - num_rows // heads + m // heads + 1
        token = gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCORES))
        best = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([BLOCK_M, RANK], gl.float32, layout=VALUES)
        nothing = gl.zeros([BLOCK_M, PAGE], gl.float32, layout=SCORES)
        for block in range(first, last):
            place = (block - first) % 2
            async_copy.wait_group(1)
            barrier()
            if WIDENS:
                keys, turned = wide_latent, wide_rope
                for i in gl.static_range(RANK // STEP):
                    part = latents.index(place).slice(i * STEP, STEP, 1).load(PIECE)
                    keys.slice(i * STEP, STEP, 1).store(part.to(dtype))
                turned.store(ropes.index(place).load(PIECE).to(dtype))
                barrier()
            else:
                keys, turned = latents.index(place), ropes.index(place)
            fence_async_shared()
            barrier()
            scores = warpgroup_mma(
                q_latent, keys.permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(q_rope, turned.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,)) * (kv_scale * LOG2_E)
            seen = (block * PAGE + token)[None, :] < limit[:, None]
            scores = gl.where(seen, scores, float("-inf"))
            new_best = gl.maximum(best, gl.max(scores, 1))
            base = gl.where(new_best == float("-inf"), 0.0, new_best)
            probs = gl.exp2(scores - base[:, None])
            shrink = gl.exp2(best - base)
            total = total * shrink + gl.sum(probs, 1)
            best = new_best
            weights.store(probs.to(dtype))
            fence_async_shared()
            barrier()
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))[:, None]
            acc = warpgroup_mma(weights, keys, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            _fetch(
                kv, table, block + 2, last, length, latents.index(place), ropes.index(place),
                RANK, ROPE, PAGE, EACH,
            )  # fmt: skip
        async_copy.wait_group(0)
        barrier()
        some = total > 0
        safe = gl.where(some, total, 1.0)
        log_sum = gl.where(some, (best + gl.log2(safe)) * LN_2, float("-inf"))
        result = acc * (kv_scale / gl.convert_layout(safe, gl.SliceLayout(1, VALUES)))[:, None]
        v = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, VALUES))
        c = gl.arange(0, RANK, layout=gl.SliceLayout(0, VALUES))
        there = (tile * BLOCK_M + v < num_rows)[:, None]
        if (begin == 0) & (stop == units):
            at = (row0 + tile * BLOCK_M + v).to(gl.int64)
            to = out + at[:, None] * RANK + c[None, :]
            gl.store(to, result.to(out.dtype.element_ty), mask=there)
            gl.store(lse + (row0 + m), log_sum, mask=m < num_rows)
        else:
            slot = unit if FIXED_PAGES > 0 else 2 * program + (begin == 0).to(gl.int32)
            part = slot.to(gl.int64) * BLOCK_M
            gl.store(part_out + (part + v)[:, None] * RANK + c[None, :], result, mask=there)
            row = m - tile * BLOCK_M
            gl.store(part_lse + (part + row), log_sum, mask=m < num_rows)
        unit += stop - begin
