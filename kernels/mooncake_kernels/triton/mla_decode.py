"""Absorbed MLA decode over paged latent KV (contract: `reference.mla_decode`).

Three launches whose shapes depend on the batch's capacity only, so a CUDA graph can hold them:
`_schedule` cuts contexts into items from the lengths on the device, `_attend` computes one item a
program in one pass over KV (the values are the keys' first `rank` columns, read once), `_combine`
merges sequences of several items. All heads of a token share a page's read: rows of a tile are
(token, head) pairs, so 64 heads fill a warpgroup's 64 rows.

Source of split KV with a merge by log-sum-exp: Flash-Decoding; of the schedule from device data:
FlashMLA's metadata kernel, simplified to whole chunks so that equal contexts are cut equally.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.triton.device import (
    INTERPRETED,
    LN_2,
    LOG2_E,
    dot,
    narrow,
    num_programs,
    pow2,
)
from mooncake_kernels.tuning import WHOLE_PAGES, DecodeTile

_MAX_TILE_ROWS = 64
_COMBINE_COLUMNS = 128
_COMBINE_SPLITS = 16


@triton.jit
def _schedule(
    lengths,
    item_first,
    num_seqs,
    programs,
    FIXED_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write item_first [num_seqs + 1]: where each sequence's items begin.

    FIXED_PAGES > 0 cuts every context alike whatever else is in the batch; 0 aims at `programs`
    items of equal size in all, at least one for each context and at most `programs + num_seqs`.
    """
    s = tl.arange(0, BLOCK_S)
    length = tl.load(lengths + s, mask=s < num_seqs, other=0)
    pages = (length + PAGE - 1) // PAGE
    if FIXED_PAGES > 0:
        items = (pages + FIXED_PAGES - 1) // FIXED_PAGES
    else:
        chunk = tl.maximum((tl.sum(pages) + programs - 1) // programs, 1)
        items = tl.where(pages > 0, tl.maximum((pages + chunk // 2) // chunk, 1), 0)
    tl.store(item_first + s + 1, tl.cumsum(items), mask=s < num_seqs)
    tl.store(item_first, 0)


@triton.jit
def _find(ends, value, num, BLOCK: tl.constexpr):
    """Return how many of the ascending `ends` [num] are at most `value`."""
    i = tl.arange(0, BLOCK)
    end = tl.load(ends + i, mask=i < num, other=2147483647)
    return tl.sum((end <= value).to(tl.int32))


@triton.jit
def _attend_pages(
    q_latent, q_rope, kv, table, first, last, length, limit, kv_scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (unnormalized output, sum, running maximum in base 2) of a tile over some pages."""
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    parts: tl.constexpr = PAGE // BLOCK_N
    for block in tl.range(first * parts, last * parts, num_stages=STAGES):
        page = tl.load(table + block // parts).to(tl.int64)
        token = block * BLOCK_N + n
        live = (token < length)[:, None]  # what lies behind the end may be NaN: never load it
        row = kv + (page * PAGE + block % parts * BLOCK_N + n)[:, None] * (RANK + ROPE)
        latent = tl.load(row + c[None, :], mask=live & (c < RANK)[None, :], other=0.0)
        rope = tl.load(row + RANK + r[None, :], mask=live & (r < ROPE)[None, :], other=0.0)
        if INTERPRETED:
            latent = latent.to(tl.float32)
        else:
            latent = latent.to(q_latent.dtype)
            rope = rope.to(q_latent.dtype)
        scores = dot(q_latent, tl.trans(latent), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = dot(q_rope, tl.trans(rope), scores) * (kv_scale * LOG2_E)
        scores = tl.where(token[None, :] < limit[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(probs, 1)
        if not INTERPRETED:
            probs = probs.to(q_latent.dtype)
        acc = dot(probs, latent, acc * shrink[:, None])
        best = new_best
    return acc * kv_scale, total, best


@triton.jit
def _attend(
    q, kv, page_table, row_start, lengths, item_first, part_out, part_lse, out, lse,
    num_seqs, heads, table_stride, part_rows, kv_scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one item. Writes the result if the context is one item, else a part."""
    tile = tl.program_id(0)
    item = tl.program_id(1)
    seq = _find(item_first + 1, item, num_seqs, BLOCK_S)
    if seq >= num_seqs:
        return
    row0 = tl.load(row_start + seq)
    num_rows = tl.load(row_start + seq + 1) - row0
    if tile * BLOCK_M >= num_rows * heads:
        return
    item0 = tl.load(item_first + seq)
    items = tl.load(item_first + seq + 1) - item0
    length = tl.load(lengths + seq)
    pages = (length + PAGE - 1) // PAGE
    per_item = (pages + items - 1) // items
    first = (item - item0) * per_item
    last = tl.minimum(first + per_item, pages)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < num_rows * heads
    limit = length - num_rows + m // heads + 1
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    at = (row0 * heads + m).to(tl.int64)
    row = q + at[:, None] * (RANK + ROPE)
    mask_c = there[:, None] & (c < RANK)[None, :]
    q_latent = tl.load(row + c[None, :], mask=mask_c, other=0.0)
    q_rope = tl.load(row + RANK + r[None, :], mask=there[:, None] & (r < ROPE)[None, :], other=0.0)
    acc, total, best = _attend_pages(
        q_latent, q_rope, kv, page_table + seq.to(tl.int64) * table_stride, first, last, length,
        limit, kv_scale, RANK, ROPE, BLOCK_C, BLOCK_R, PAGE, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    seen = total > 0
    result = acc / tl.where(seen, total, 1.0)[:, None]
    log_sum = tl.where(seen, (best + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    if items == 1:
        tl.store(
            out + at[:, None] * RANK + c[None, :], narrow(result, out.dtype.element_ty), mask_c
        )
        tl.store(lse + at, log_sum, there)
    else:
        part = item.to(tl.int64) * part_rows + m
        tl.store(part_out + part[:, None] * RANK + c[None, :], result, mask_c)
        tl.store(part_lse + part, log_sum, there)


@triton.jit
def _combine(
    row_start, item_first, part_out, part_lse, out, lse, num_seqs, heads, part_rows,
    RANK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one (row, head) in some columns; rows that see nothing become 0."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = row.to(tl.int64) * heads + head
    seq = _find(row_start + 1, row, num_seqs, BLOCK_S)
    items = 0
    item0 = 0
    m = 0
    if seq < num_seqs:
        item0 = tl.load(item_first + seq)
        items = tl.load(item_first + seq + 1) - item0
        m = (row - tl.load(row_start + seq)) * heads + head
    if items == 1:
        return
    p = tl.arange(0, BLOCK_P)
    best = float("-inf")
    total = 0.0
    for begin in range(0, items, BLOCK_P):
        part = (item0 + begin + p).to(tl.int64) * part_rows + m
        each = tl.load(part_lse + part, mask=begin + p < items, other=float("-inf")) * LOG2_E
        new_best = tl.maximum(best, tl.max(each, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp2(best - base) + tl.sum(tl.exp2(each - base), 0)
        best = new_best
    seen = total > 0
    log_sum = tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    acc = tl.zeros([BLOCK_C], tl.float32)
    for begin in range(0, items, BLOCK_P):
        part = (item0 + begin + p).to(tl.int64) * part_rows + m
        each = tl.load(part_lse + part, mask=begin + p < items, other=float("-inf")) * LOG2_E
        weight = tl.where(each > float("-inf"), tl.exp2(each - log_sum), 0.0)
        values = tl.load(
            part_out + part[:, None] * RANK + c[None, :],
            mask=(weight > 0)[:, None] & (c < RANK)[None, :],
            other=0.0,
        )
        acc += tl.sum(values * weight[:, None], 0)
    tl.store(out + at * RANK + c, narrow(acc, out.dtype.element_ty), mask=c < RANK)
    tl.store(lse + at, log_sum * LN_2)


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    rank: int,
    kv_scale: float = 1.0,
    *,
    split_pages: int = 0,
    tile: DecodeTile = WHOLE_PAGES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, rank] in q's dtype, lse [rows, heads] float32); see the reference.

    `block_tokens` must be a power of two of at least 16; q and kv contiguous. split_pages: 0 cuts
    contexts so that the batch fills the GPU; a number cuts each context every so many pages, which
    makes a sequence's result independent of the rest of the batch.
    """
    rows, heads, width = q.shape
    page, seqs = kv.shape[1], batch.num_sequences
    step_tokens = tile.step_tokens or page
    if page < 16 or page & (page - 1):
        raise ValueError(f"pages of {page} tokens; the kernel takes powers of two from 16 on")
    if step_tokens < 16 or page % step_tokens:
        raise ValueError(f"steps of {step_tokens} tokens do not cut pages of {page}")
    if not (q.is_contiguous() and kv.is_contiguous() and batch.page_table.is_contiguous()):
        raise ValueError("q, kv and page_table must be contiguous")
    tile_rows = min(_MAX_TILE_ROWS, pow2(batch.max_rows * heads, 16))
    if split_pages:  # the size of a tile chooses the instruction, and that the order of sums
        tile_rows = _MAX_TILE_ROWS
    tiles = triton.cdiv(batch.max_rows * heads, tile_rows)
    programs = max(1, num_programs(q.device) // tiles)
    most_pages = batch.page_table.shape[1]
    items = seqs * triton.cdiv(most_pages, split_pages) if split_pages else programs + seqs
    part_rows, block_s = tiles * tile_rows, pow2(seqs)
    item_first = torch.empty(seqs + 1, dtype=torch.int32, device=q.device)
    part_out = torch.empty(items, part_rows, rank, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(items, part_rows, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    _schedule[(1,)](
        batch.lengths, item_first, seqs, programs,
        FIXED_PAGES=split_pages, PAGE=page, BLOCK_S=block_s,
    )  # fmt: skip
    _attend[(tiles, items)](
        q, kv, batch.page_table, batch.row_start, batch.lengths, item_first,
        part_out, part_lse, out, lse, seqs, heads, most_pages, part_rows, kv_scale,
        RANK=rank, ROPE=width - rank, BLOCK_C=pow2(rank, 16), BLOCK_R=pow2(width - rank, 16),
        PAGE=page, BLOCK_M=tile_rows, BLOCK_N=step_tokens, BLOCK_S=block_s,
        STAGES=tile.stages, num_warps=8 if tile_rows == _MAX_TILE_ROWS else 4,
    )  # fmt: skip
    columns = min(_COMBINE_COLUMNS, pow2(rank))
    _combine[(rows, heads, triton.cdiv(rank, columns))](
        batch.row_start, item_first, part_out, part_lse, out, lse, seqs, heads, part_rows,
        RANK=rank, BLOCK_C=columns, BLOCK_P=_COMBINE_SPLITS, BLOCK_S=block_s, num_warps=4,
    )  # fmt: skip
    return out, lse
