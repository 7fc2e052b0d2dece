"""Absorbed MLA decode over paged latent KV (contract: `reference.mla_decode`).

The shapes of launches depend only on the batch's capacity, so a CUDA graph can hold them. All heads
of a token share one read of a page: rows of a tile are (token, head) pairs, so 64 heads fill a
warpgroup's 64 rows. A strip is one tile over its whole context. `_schedule` puts the pages of all
strips in one line, once a step. In `_attend`, as many programs as the GPU runs at once take equal
ranges of that line, wherever strips begin and end, in one pass over KV (the values are the keys'
first `rank` columns, read once). A range begins and ends inside a strip at most once each, so two
slots per program hold all partial results, whatever the batch is; `_combine` merges them. With
`split_pages`, a strip is cut after every so many pages instead. Then each part has a slot, and
strips are taken in groups whose slots fit `_SLOT_BYTES`.

Source of split KV with a merge by log-sum-exp: Flash-Decoding. Source of the schedule from device
data: FlashMLA's metadata kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.triton import mla_decode_hopper
from mooncake_kernels.triton.device import (
    INTERPRETED,
    LN_2,
    LOG2_E,
    compiles_for_hopper,
    dot,
    narrow,
    num_programs,
    pow2,
)
from mooncake_kernels.tuning import DEFAULT_DECODE, DecodeTile

TILE_ROWS = 64
_SEQUENCES_AT_ONCE = 256
_COMBINE_PARTS = 16
_COMBINE_PROGRAMS = 1024
_SLOT_BYTES = 256 * 2**20


@triton.jit
def _num_strips(row_start, s, mask, heads, BLOCK_M: tl.constexpr):
    """Return how many tiles the rows of sequences `s` make."""
    rows = tl.load(row_start + s + 1, mask=mask, other=0) - tl.load(
        row_start + s, mask=mask, other=0
    )
    return (rows * heads + BLOCK_M - 1) // BLOCK_M


@triton.jit(do_not_specialize=["num_seqs", "strip_from", "strip_to"])
def _schedule(
    row_start, lengths, first_unit, first_tile, num_seqs, heads, strip_from, strip_to,
    FIXED_PAGES: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Put the units of strips `strip_from` to `strip_to` in one line.

    A unit is a page, or FIXED_PAGES of them when that is not 0. Writes first_unit [seqs + 1], where
    each sequence's units begin, and first_tile [seqs], the first of its tiles that is included.
    """
    WIDTH: tl.constexpr = PAGE * (FIXED_PAGES if FIXED_PAGES > 0 else 1)
    units_before = 0
    strips_before = 0
    tl.store(first_unit, 0)
    for begin in range(0, num_seqs, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        mask = s < num_seqs
        units = (tl.load(lengths + s, mask=mask, other=0) + WIDTH - 1) // WIDTH
        strips = _num_strips(row_start, s, mask, heads, BLOCK_M)
        before = strips_before + tl.cumsum(strips, 0) - strips
        skipped = tl.minimum(tl.maximum(strip_from - before, 0), strips)
        taken = tl.minimum(tl.maximum(strip_to - before, 0), strips) - skipped
        tl.store(first_tile + s, skipped, mask=mask)
        tl.store(first_unit + s + 1, units_before + tl.cumsum(units * taken, 0), mask=mask)
        units_before += tl.sum(units * taken, 0)
        strips_before += tl.sum(strips, 0)


@triton.jit
def _find(ends, value, num, BLOCK: tl.constexpr):
    """Return how many of the ascending `ends` [num] are at most `value`."""
    found = 0
    for begin in range(0, num, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        end = tl.load(ends + i, mask=i < num, other=2147483647)
        found += tl.sum((end <= value).to(tl.int32))
    return found


@triton.jit
def _item(
    row_start, lengths, first_unit, first_tile, seq, item, unit, end, heads,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Return (rows m of the strip, whether they exist, their places in q and out; the item's first
    unit of the strip, the one after its last, how many the strip has).

    Reads again what is known about the item, because that is cheaper than holding registers during
    the pages.
    """
    row0 = tl.load(row_start + seq, volatile=True)
    num_rows = tl.load(row_start + seq + 1, volatile=True) - row0
    length = tl.load(lengths + seq, volatile=True)
    units = (length + PAGE * WIDTH - 1) // (PAGE * WIDTH)
    tile = tl.load(first_tile + seq, volatile=True)
    if FIXED:
        tile += item // units
        begin = item % units
        stop = begin + 1
    else:
        tile += item
        line = tl.load(first_unit + seq, volatile=True) + item * units
        begin = tl.maximum(unit - line, 0)
        stop = tl.minimum(end - line, units)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at = (row0 * heads + m).to(tl.int64)
    return m, m < num_rows * heads, at, begin, stop, units


@triton.jit
def _attend_pages(
    q_latent, q_rope, kv, table, first, last, length, limit, least, kv_scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (output neither scaled nor divided, sum, running maximum in base 2) of a tile over
    some pages. `limit`: what each row sees; `least`: what all rows see.
    """
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    if BLOCK_C > RANK:  # of no weight: the query has zeros there, and they are not stored
        c = tl.minimum(c, RANK - 1)
    if BLOCK_R > ROPE:
        r = tl.minimum(r, ROPE - 1)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    scale = kv_scale * LOG2_E
    parts: tl.constexpr = PAGE // BLOCK_N
    begin = first * parts
    end = tl.minimum(last * parts, (length + BLOCK_N - 1) // BLOCK_N)
    ahead = tl.load(table + first)  # a step before it is needed, so that pages can be too
    for block in tl.range(begin, end, num_stages=STAGES):
        start = kv + (ahead.to(tl.int64) * PAGE + block % parts * BLOCK_N) * (RANK + ROPE)
        ahead = tl.load(table + tl.minimum(block + 1, end - 1) // parts)
        # What follows the end may be NaN, so the last token is read instead, with no weight.
        row = (tl.minimum(n, length - 1 - block * BLOCK_N) * (RANK + ROPE))[:, None]
        latent = tl.load(start + (row + c[None, :]))
        rope = tl.load(start + (row + (RANK + r)[None, :]))
        if INTERPRETED:
            latent = latent.to(tl.float32)
        else:
            latent = latent.to(q_latent.dtype)
            rope = rope.to(q_latent.dtype)
        # Of a product whose result goes straight into another one the compiler gives each half of
        # the warps all of it, not half: hence two products side by side, and an `if`.
        nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = dot(q_latent, tl.trans(latent), nothing)
        scores = scores * scale + dot(q_rope, tl.trans(rope), nothing) * scale
        if (block + 1) * BLOCK_N > least:
            token = block * BLOCK_N + n
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
    return acc, total, best


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _attend(
    q, kv, page_table, row_start, lengths, first_unit, first_tile, part_out, part_lse, out, lse,
    num_seqs, heads, table_stride, kv_scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr, FIXED_PAGES: tl.constexpr,
):  # fmt: skip
    """Attend over a range of units. A strip that is whole here is finished; others go to slots.

    An item is the range's part of a strip, or a unit when FIXED_PAGES is not 0.
    """
    FIXED: tl.constexpr = FIXED_PAGES > 0
    WIDTH: tl.constexpr = FIXED_PAGES if FIXED else 1
    program = tl.program_id(0)
    all_units = tl.load(first_unit + num_seqs)
    each = (all_units + tl.num_programs(0) - 1) // tl.num_programs(0)
    unit = program * each
    end = tl.minimum(unit + each, all_units)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    while unit < end:
        seq = _find(first_unit + 1, unit, num_seqs, BLOCK_S)
        length = tl.load(lengths + seq)
        line = tl.load(first_unit + seq)
        of_item = 1 if FIXED else (length + PAGE - 1) // PAGE
        behind = tl.minimum(tl.load(first_unit + seq + 1), end)
        # Addresses of the queries and the output are computed late. If they were kept during the
        # pages, they would be spilled.
        for item in tl.range(
            (unit - line) // of_item, tl.cdiv(behind - line, of_item), disable_licm=True
        ):
            m, there, at, begin, stop, _ = _item(
                row_start, lengths, first_unit, first_tile, seq, item, unit, end, heads,
                PAGE, WIDTH, BLOCK_M, FIXED,
            )  # fmt: skip
            length = tl.load(lengths + seq)
            num_rows = tl.load(row_start + seq + 1) - tl.load(row_start + seq)
            limit = length - num_rows + m // heads + 1
            least = length - num_rows + 1
            row = q + at[:, None] * (RANK + ROPE)
            mask_c = there[:, None] & (c < RANK)[None, :]
            mask_r = there[:, None] & (r < ROPE)[None, :]
            q_latent = tl.load(row + c[None, :], mask=mask_c, other=0.0)
            q_rope = tl.load(row + RANK + r[None, :], mask=mask_r, other=0.0)
            acc, total, best = _attend_pages(
                q_latent, q_rope, kv, page_table + seq.to(tl.int64) * table_stride, begin * WIDTH,
                tl.minimum(stop * WIDTH, (length + PAGE - 1) // PAGE), length, limit,
                least, kv_scale,
                RANK, ROPE, BLOCK_C, BLOCK_R, PAGE, BLOCK_M, BLOCK_N, STAGES,
            )  # fmt: skip
            seen = total > 0
            safe = tl.where(seen, total, 1.0)
            result = acc * (kv_scale / safe)[:, None]
            log_sum = tl.where(seen, (best + tl.log2(safe)) * LN_2, float("-inf"))
            m, there, at, begin, stop, units = _item(
                row_start, lengths, first_unit, first_tile, seq, item, unit, end, heads,
                PAGE, WIDTH, BLOCK_M, FIXED,
            )  # fmt: skip
            mask_c = there[:, None] & (c < RANK)[None, :]
            if (begin == 0) & (stop == units):
                to = out + at[:, None] * RANK + c[None, :]
                tl.store(to, narrow(result, out.dtype.element_ty), mask_c)
                tl.store(lse + at, log_sum, there)
            else:
                if FIXED:
                    slot = tl.load(first_unit + seq) + item
                else:
                    slot = 2 * program + (begin == 0).to(tl.int32)
                part = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
                tl.store(part_out + part[:, None] * RANK + c[None, :], result, mask_c)
                tl.store(part_lse + part, log_sum, there)
        unit = tl.minimum(tl.load(first_unit + seq + 1, volatile=True), end)


@triton.jit
def _slots(begin, each, i, FIXED_PAGES: tl.constexpr):
    """Return the slots of parts `i` of the strip whose units begin at `begin`."""
    if FIXED_PAGES > 0:
        return begin + i
    else:  # noqa: RET505
        return 2 * (begin // each + i) + (i == 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_seqs", "programs"])
def _combine(
    row_start, lengths, first_unit, first_tile, part_out, part_lse, out, lse,
    num_seqs, heads, programs,
    RANK: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, FIXED_PAGES: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some heads of one row; rows that see nothing become 0."""
    WIDTH: tl.constexpr = PAGE * (FIXED_PAGES if FIXED_PAGES > 0 else 1)
    row = tl.program_id(0)
    seq = _find(row_start + 1, row, num_seqs, BLOCK_S)
    units = 0
    line = 0
    tile0 = 0
    taken = 0
    m0 = 0
    if seq < num_seqs:
        units = (tl.load(lengths + seq) + WIDTH - 1) // WIDTH
        line = tl.load(first_unit + seq)
        tile0 = tl.load(first_tile + seq)
        taken = tl.load(first_unit + seq + 1) - line
        m0 = (row - tl.load(row_start + seq)) * heads
    each = (tl.load(first_unit + num_seqs) + programs - 1) // programs
    each = tl.maximum(each, 1)
    p = tl.arange(0, BLOCK_P)
    c = tl.arange(0, BLOCK_C)
    for head in range(tl.program_id(1), heads, tl.num_programs(1)):
        m = m0 + head
        begin = line + (m // BLOCK_M - tile0) * units
        parts = units if FIXED_PAGES > 0 else (begin + units - 1) // each - begin // each + 1
        here = (begin >= line) & (begin < line + taken)
        if (units == 0) | (here & (parts > 1)):
            parts = tl.where(units == 0, 0, parts)
            best = float("-inf")
            total = 0.0
            acc = tl.zeros([BLOCK_C], tl.float32)
            for first in range(0, parts, BLOCK_P):
                i = first + p
                part = _slots(begin, each, i, FIXED_PAGES).to(tl.int64) * BLOCK_M + m % BLOCK_M
                log_sum = tl.load(part_lse + part, mask=i < parts, other=float("-inf")) * LOG2_E
                new_best = tl.maximum(best, tl.max(log_sum, 0))
                base = tl.where(new_best == float("-inf"), 0.0, new_best)
                weight = tl.exp2(log_sum - base)
                values = tl.load(
                    part_out + part[:, None] * RANK + c[None, :],
                    mask=(weight > 0)[:, None] & (c < RANK)[None, :],
                    other=0.0,
                )
                shrink = tl.exp2(best - base)
                acc = acc * shrink + tl.sum(values * weight[:, None], 0)
                total = total * shrink + tl.sum(weight, 0)
                best = new_best
            seen = total > 0
            safe = tl.where(seen, total, 1.0)
            at = row.to(tl.int64) * heads + head
            result = narrow(acc / safe, out.dtype.element_ty)
            tl.store(out + at * RANK + c, result, mask=c < RANK)
            tl.store(lse + at, tl.where(seen, (best + tl.log2(safe)) * LN_2, float("-inf")))


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    rank: int,
    kv_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    *,
    split_pages: int = 0,
    tile: DecodeTile = DEFAULT_DECODE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, rank], lse [rows, heads] float32); see the reference.

    `block_tokens` must be a power of two of at least 16; q and kv must be contiguous. split_pages:
    0 shares out pages equally among as many programs as the GPU runs at once. Another number cuts
    each context after every so many pages, which makes a sequence's result independent of the rest
    of the batch.
    """
    rows, heads, width = q.shape
    page, seqs = kv.shape[1], batch.num_sequences
    if page < 16 or page & (page - 1):
        raise ValueError(f"pages of {page} tokens; the kernel takes powers of two from 16 on")
    if not (q.is_contiguous() and kv.is_contiguous() and batch.page_table.is_contiguous()):
        raise ValueError("q, kv and page_table must be contiguous")
    if tile.warpgroups:
        _check_warpgroups(q, page, rank)
    # The size of a tile determines the instruction, and that the order of sums.
    rows_of_any = TILE_ROWS if split_pages or tile.warpgroups else batch.max_rows * heads
    warpgroups = tile.warpgroups
    if tile == DEFAULT_DECODE:
        warpgroups = _warpgroups_are_faster(q, kv, rank, rows_of_any, split_pages)
    form = _form(q.dtype, kv.dtype, rows_of_any)
    tile_rows = form.rows
    step_tokens = tile.step_tokens or min(page, form.step_tokens)
    if step_tokens < 16 or page % step_tokens:
        raise ValueError(f"steps of {step_tokens} tokens do not cut pages of {page}")
    programs = num_programs(q.device) * form.programs
    most_pages = batch.page_table.shape[1]
    most_strips = rows * heads // tile_rows + seqs
    slots, group = 2 * programs, most_strips
    if split_pages:
        parts = max(1, triton.cdiv(most_pages, split_pages))
        group = min(most_strips, max(1, _SLOT_BYTES // (parts * tile_rows * rank * 4)))
        slots = group * parts if parts > 1 else 0
    part_out = torch.empty(slots, tile_rows, rank, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(slots, tile_rows, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, rank, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not rows:
        return out, lse
    for strip in range(0, most_strips, group):
        plan = _plan(batch, heads, page, tile_rows, split_pages, (strip, strip + group))
        tensors = (
            q, kv, batch.page_table, batch.row_start, batch.lengths, *plan,
            part_out, part_lse, out, lse, seqs, heads, most_pages, kv_scale,
        )  # fmt: skip
        if warpgroups:
            mla_decode_hopper.attend_warpgroups[(programs,)](
                *tensors, RANK=rank, ROPE=width - rank, PAGE=page, BLOCK_M=tile_rows,
                BLOCK_S=_SEQUENCES_AT_ONCE, FIXED_PAGES=split_pages, EACH=16 // kv.element_size(),
                num_warps=mla_decode_hopper.WARPS,
            )  # fmt: skip
        else:
            _attend[(programs,)](
                *tensors, RANK=rank, ROPE=width - rank, BLOCK_C=pow2(rank, 16),
                BLOCK_R=pow2(width - rank, 16), PAGE=page, BLOCK_M=tile_rows, BLOCK_N=step_tokens,
                BLOCK_S=_SEQUENCES_AT_ONCE, STAGES=tile.stages or form.stages,
                FIXED_PAGES=split_pages, num_warps=form.warps,
            )  # fmt: skip
        _combine[(rows, min(heads, triton.cdiv(_COMBINE_PROGRAMS, rows)))](
            batch.row_start, batch.lengths, *plan, part_out, part_lse, out, lse,
            seqs, heads, programs,
            RANK=rank, PAGE=page, BLOCK_M=tile_rows, BLOCK_C=pow2(rank), BLOCK_P=_COMBINE_PARTS,
            BLOCK_S=_SEQUENCES_AT_ONCE, FIXED_PAGES=split_pages, num_warps=4,
        )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class _Form:
    """How `_attend` is compiled: rows of a tile, most tokens of a step, stages (steps that are held
    or arriving), warps, and `programs` per multiprocessor.
    """

    rows: int
    step_tokens: int
    stages: int
    warps: int
    programs: int = 1


_FLOAT32 = _Form(16, 32, 2, 4, 2)
"""The form for float32, which only comparisons use: larger tiles need more shared memory than there
is.
"""
_FEW_ROWS = _Form(16, 64, 2, 4, 2), _Form(32, 64, 3, 8)
_BF16_CACHE, _FP8_CACHE = _Form(TILE_ROWS, 32, 4, 8), _Form(TILE_ROWS, 64, 3, 8)
"""No form spills (`tests/kernels/test_compiles_for_hopper.py`; kernels/README.md lists what was
tried). Few rows of an FP8 cache are padded with zeros, because widening for a small tile's products
takes longer than computing the padding.
"""


def _form(dtype: torch.dtype, kv_dtype: torch.dtype, rows: int) -> _Form:
    """Return the form for at most `rows` (token, head) rows of a sequence."""
    if dtype == torch.float32:
        return _FLOAT32
    if kv_dtype.itemsize == 1:
        return _FP8_CACHE
    return next((form for form in _FEW_ROWS if rows <= form.rows), _BF16_CACHE)


_MADE_FOR = mla_decode_hopper.PAGE, mla_decode_hopper.RANK, mla_decode_hopper.ROPE


def _warpgroups_are_faster(
    q: torch.Tensor, kv: torch.Tensor, rank: int, rows: int, split_pages: int
) -> bool:
    """Return whether `attend_warpgroups` is served in place of `_attend`.

    On an H200 (Triton 3.6) it took 242 us in place of 299 (64 heads, 128 sequences of 4,096
    tokens). With 8 heads it took 211 in place of 165, with an FP8 cache 381 in place of 334. Fixed
    cuts keep one form, so that no bits depend on a batch.
    """
    return (
        compiles_for_hopper()
        and not split_pages
        and rows > _FEW_ROWS[-1].rows
        and q.dtype == kv.dtype == torch.bfloat16
        and (kv.shape[1], rank, q.shape[2] - rank) == _MADE_FOR
    )


def _check_warpgroups(q: torch.Tensor, page: int, rank: int) -> None:
    if (page, rank, q.shape[2] - rank) != _MADE_FOR or q.element_size() != 2:
        raise ValueError(
            f"warpgroups take 16-bit queries, and pages, rank and rotated part of {_MADE_FOR}"
        )


def _plan(
    batch: PagedBatch,
    heads: int,
    page: int,
    tile_rows: int,
    split_pages: int,
    strips: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first_unit, first_tile) of `_schedule`, made once for all layers of a step."""
    key = "mla_decode", heads, page, tile_rows, split_pages, strips
    if key not in batch.plans:
        seqs, device = batch.num_sequences, batch.lengths.device
        first_unit = torch.empty(seqs + 1, dtype=torch.int32, device=device)
        first_tile = torch.empty(seqs, dtype=torch.int32, device=device)
        _schedule[(1,)](
            batch.row_start, batch.lengths, first_unit, first_tile, seqs, heads, *strips,
            FIXED_PAGES=split_pages, PAGE=page, BLOCK_M=tile_rows, BLOCK_S=_SEQUENCES_AT_ONCE,
        )  # fmt: skip
        batch.plans[key] = first_unit, first_tile
    made: tuple[torch.Tensor, torch.Tensor] = batch.plans[key]
    return made
