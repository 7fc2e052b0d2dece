"""Both forms of MLA by spans (contracts: `reference.mla`), with the decode and prefill kernels.

The host knows the spans, so page tables are copied to the device here, once for all layers of a
step. A captured step calls `mla_decode` with tables of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.reference.paged import PagedSpan, sent
from mooncake_kernels.reference.paged_batch import PagedBatch, batch_of_spans
from mooncake_kernels.triton.device import pow2
from mooncake_kernels.triton.merge import merge_attention
from mooncake_kernels.triton.mla_decode import TILE_ROWS, mla_decode
from mooncake_kernels.triton.mla_prefill import mla_prefill

_ALIGNED = 4
"""Rows of a tensor are padded to this many int32 numbers, because Triton compiles a kernel anew for
a tensor that is not aligned.
"""
CHUNK_TOKENS = 32768
"""How many keys are expanded at a time: 1.3 GB for Kimi-K2's 64 heads in bfloat16."""


def mla_absorbed(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    rank: int,
    *,
    split_pages: int = 0,
) -> torch.Tensor:
    """Return the attended latents, [rows, heads, rank]; see the reference and `mla_decode`."""
    apart = q.shape[1] < TILE_ROWS  # else all spans have the same tiles
    parts = [
        mla_decode(q[rows].contiguous(), kv, batch, rank, split_pages=split_pages)[0]
        for rows, batch in _batches(tuple(spans), q.device, apart)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@functools.lru_cache(maxsize=2)
def _batches(
    spans: tuple[PagedSpan, ...], device: torch.device, apart: bool
) -> list[tuple[slice, PagedBatch]]:
    """Return the spans as batches and their rows. `apart`: spans of one row, which small tiles
    hold, are separate from others. This is computed for the first layer of a step and reused for
    the rest.
    """
    runs = [list(run) for _, run in itertools.groupby(spans, lambda s: apart and s.num_rows > 1)]
    found = []
    for run in runs:
        first = run[0].first_row
        own = [replace(span, first_row=span.first_row - first) for span in run]
        rows = slice(first, run[-1].first_row + run[-1].num_rows)
        found.append((rows, batch_of_spans(own, device)))
    if [rows.start for rows, _ in found] != [0, *(rows.stop for rows, _ in found[:-1])]:
        raise ValueError("spans are not one after another from row 0")
    return found


def mla_expanded(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """Return the attended values, [rows, heads, value width]; see the reference.

    Contexts that fit `chunk_tokens` together are expanded at once. A longer one is expanded in
    chunks, whose results are merged by their log-sum-exps.
    """
    out = q.new_empty(q.shape[0], q.shape[1], value_up.shape[1])
    for group in _groups(spans, chunk_tokens):
        cached = [torch.cat([part.to(q.dtype) for part in span.keys(kv)]) for span in group]
        rows = slice(group[0].first_row, group[-1].first_row + group[-1].num_rows)
        longest = max(span.context for span in group)
        parts = []
        for begin in range(0, longest, chunk_tokens):
            end = min(begin + chunk_tokens, longest)
            chunk = torch.cat([rows_of[begin:end] for rows_of in cached])
            batch = _ragged(tuple(group), begin, end, q.device)
            parts.append(mla_prefill(q[rows], _expanded(chunk, key_up, value_up), batch))
        if len(parts) == 1:
            out[rows] = parts[0][0]
        else:
            outs, lses = (list(each) for each in zip(*parts, strict=True))
            # Their number is padded to a power of two with parts of no weight, because each number
            # is a kernel to compile.
            missing = pow2(len(parts)) - len(parts)
            outs += outs[-1:] * missing
            lses += [torch.full_like(lses[-1], -math.inf)] * missing
            out[rows], _ = merge_attention(torch.stack(outs), torch.stack(lses))
    return out


def _groups(spans: Sequence[PagedSpan], chunk_tokens: int) -> list[list[PagedSpan]]:
    """Return neighbouring spans, grouped while their contexts fit one chunk."""
    groups: list[list[PagedSpan]] = []
    held = 0
    for span in spans:
        if groups and held + span.context <= chunk_tokens:
            groups[-1].append(span)
            held += span.context
        else:
            groups.append([span])
            held = span.context
    return groups


@functools.lru_cache(maxsize=64)
def _ragged(
    spans: tuple[PagedSpan, ...], begin: int, end: int, device: torch.device
) -> RaggedBatch:
    """Return the batch of `spans` over their keys `begin` to `end`, for all layers."""
    row_start, key_start, first_seen = [0], [0], []
    for span in spans:
        row_start.append(row_start[-1] + span.num_rows)
        key_start.append(key_start[-1] + max(0, min(end, span.context) - begin))
        first_seen.append(span.context - span.num_rows + 1 - begin)
    most, count = max(span.num_rows for span in spans), len(spans)
    host = torch.zeros(3, triton.cdiv(count + 1, _ALIGNED) * _ALIGNED, dtype=torch.int32)
    for row, values in enumerate((row_start, key_start, first_seen)):
        host[row, : len(values)] = torch.tensor(values, dtype=torch.int32)
    tensors = sent(host, device)
    return RaggedBatch(tensors[0, : count + 1], tensors[1, : count + 1], tensors[2, :count], most)


def _expanded(cached: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor) -> ExpandedKeys:
    """Return keys and values of `cached` [tokens, rank + rope]; heads are the outer axis."""
    rank = key_up.shape[1]
    latent = cached[:, :rank].expand(key_up.shape[0], -1, -1)
    nope = torch.bmm(latent, key_up).transpose(0, 1)
    values = torch.bmm(latent, value_up.transpose(1, 2)).transpose(0, 1)
    return ExpandedKeys(nope, cached[:, rank:], values)
