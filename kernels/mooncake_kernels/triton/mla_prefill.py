"""Causal attention of ragged batches over expanded keys (contract: `reference.mla_prefill`).

A program takes one tile of rows of one head. The rope part of the keys, which heads share, is
multiplied separately, so 192-wide keys are never assembled. Keys that all rows of a tile see are
walked without a mask; only the last few are compared. Later tiles see most keys and are started
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.triton.device import INTERPRETED, LN_2, LOG2_E, dot, narrow, pow2

_BLOCK_ROWS = 128
_BLOCK_KEYS = 64


@triton.jit
def _walk(
    q_nope, q_rope, nope, rope, values, strides, begin, end, limit, state,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the state (acc, total, best) after keys `begin` to `end`. NaN after `end` is
    not read.
    """
    acc, total, best = state
    nope_stride, rope_stride, value_stride = strides
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    v = tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        key = n.to(tl.int64)[:, None]
        live = (n < end)[:, None]
        k_nope = tl.load(
            nope + key * nope_stride + d[None, :], mask=live & (d < NOPE)[None, :], other=0.0
        )
        k_rope = tl.load(
            rope + key * rope_stride + r[None, :], mask=live & (r < ROPE)[None, :], other=0.0
        )
        value = tl.load(
            values + key * value_stride + v[None, :], mask=live & (v < VALUE)[None, :], other=0.0
        )
        scores = tl.zeros([acc.shape[0], BLOCK_N], tl.float32)
        scores = dot(q_nope, tl.trans(k_nope), scores)
        scores = dot(q_rope, tl.trans(k_rope), scores) * LOG2_E
        if MASKED:
            scores = tl.where(n[None, :] < limit[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        probs = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(probs, 1)
        if not INTERPRETED:
            probs = probs.to(value.dtype)
        acc = dot(probs, value, acc * shrink[:, None])
        best = new_best
    return acc, total, best


@triton.jit
def _prefill(
    q, nope, rope, values, out, lse, row_start, key_start, first_seen, heads,
    q_stride, q_head, nope_stride, nope_head, rope_stride, value_stride, value_head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    seq = tl.program_id(2)
    row0 = tl.load(row_start + seq).to(tl.int64)
    num_rows = tl.load(row_start + seq + 1).to(tl.int32) - row0.to(tl.int32)
    if tile * BLOCK_M >= num_rows:
        return
    key0 = tl.load(key_start + seq).to(tl.int64)
    num_keys = tl.load(key_start + seq + 1) - key0.to(tl.int32)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = m < num_rows
    seen = tl.load(first_seen + seq)
    limit = tl.minimum(seen + m, num_keys)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    v = tl.arange(0, BLOCK_V)
    row = q + (row0 + m)[:, None] * q_stride + head * q_head
    q_nope = tl.load(row + d[None, :], mask=there[:, None] & (d < NOPE)[None, :], other=0.0)
    q_rope = tl.load(row + NOPE + r[None, :], mask=there[:, None] & (r < ROPE)[None, :], other=0.0)
    nope += key0 * nope_stride + head.to(tl.int64) * nope_head
    rope += key0 * rope_stride
    values += key0 * value_stride + head.to(tl.int64) * value_head
    # All rows see the keys before `whole`, none sees those from `end` on.
    whole = tl.minimum(seen + tile * BLOCK_M, num_keys)
    whole = tl.maximum(whole, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum((tile + 1) * BLOCK_M, num_rows) - 1
    end = tl.minimum(seen + last, num_keys)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    strides = (nope_stride, rope_stride, value_stride)
    acc, total, best = _walk(
        q_nope, q_rope, nope, rope, values, strides, 0, whole, limit, (acc, total, best),
        NOPE, ROPE, VALUE, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_N, False, STAGES,
    )  # fmt: skip
    acc, total, best = _walk(
        q_nope, q_rope, nope, rope, values, strides, whole, end, limit, (acc, total, best),
        NOPE, ROPE, VALUE, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_N, True, STAGES,
    )  # fmt: skip
    any_seen = total > 0
    safe = tl.where(any_seen, total, 1.0)
    at = (row0 + m) * heads + head
    result = narrow(acc / safe[:, None], out.dtype.element_ty)
    mask = there[:, None] & (v < VALUE)[None, :]
    tl.store(out + at[:, None] * VALUE + v[None, :], result, mask=mask)
    log_sum = tl.where(any_seen, (best + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse + at, log_sum, mask=there)


def mla_prefill(
    q: torch.Tensor, keys: ExpandedKeys, batch: RaggedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, value width] in q's dtype, lse [rows, heads]); see the reference.

    The last axis of every input must be contiguous; the others may have any stride. Every row must
    belong to a sequence.
    """
    rows, heads, width = q.shape
    parts = (q, keys.nope, keys.rope, keys.values)
    if any(part.shape[-1] > 1 and part.stride(-1) != 1 for part in parts):
        raise ValueError("the last axis of q, nope, rope and values must be contiguous")
    value, nope = keys.values.shape[2], keys.nope.shape[2]
    out = torch.empty(rows, heads, value, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not rows:
        return out, lse
    block_m = min(_BLOCK_ROWS, pow2(batch.max_rows, 16))
    large = block_m == _BLOCK_ROWS
    seqs = batch.first_seen.shape[0]
    # Three stages of a large tile: 474 TFLOP/s in place of 366 on an H200 (four: 469), with equal
    # bits; with 64 rows two were faster (409, three 314). Float32 has no shared memory for three.
    _prefill[(heads, triton.cdiv(batch.max_rows, block_m), seqs)](
        q, keys.nope, keys.rope, keys.values, out, lse,
        batch.row_start, batch.key_start, batch.first_seen, heads,
        q.stride(0), q.stride(1), keys.nope.stride(0), keys.nope.stride(1), keys.rope.stride(0),
        keys.values.stride(0), keys.values.stride(1),
        NOPE=nope, ROPE=width - nope, VALUE=value, BLOCK_D=pow2(nope, 16),
        BLOCK_R=pow2(width - nope, 16), BLOCK_V=pow2(value, 16), BLOCK_M=block_m,
        BLOCK_N=_BLOCK_KEYS, STAGES=3 if large and q.element_size() == 2 else 2,
        num_warps=8 if large else 4,
    )  # fmt: skip
    return out, lse
