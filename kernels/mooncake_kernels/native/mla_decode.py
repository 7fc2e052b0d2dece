"""Absorbed MLA of few rows over paged latent KV. Each page is read where it lies."""

from __future__ import annotations

import ctypes

import torch

from mooncake_kernels.native import build
from mooncake_kernels.reference.paged_batch import PagedBatch

_HEADS, _WORD = 8, 32
_MOST_TOKENS, _MOST_RANK = 256, 1024


def fits(heads: int, width: int, rank: int, block_tokens: int, dtype: torch.dtype) -> bool:
    """Return whether compiled code supports pages [.., block_tokens, width] of `dtype`."""
    whole = not (heads % _HEADS or width % _WORD or rank % _WORD)
    small = block_tokens <= _MOST_TOKENS and rank <= _MOST_RANK
    return dtype == torch.bfloat16 and whole and small and build.why_not() is None


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    rank: int,
    kv_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like the reference, for bfloat16 q and kv for which `fits` is true, and kv_scale 1."""
    rows, heads, width = q.shape
    assert kv_scale == 1.0
    assert fits(heads, width, rank, kv.shape[1], kv.dtype)
    q = q.contiguous()
    out = q.new_empty(rows, heads, rank, dtype=out_dtype)
    lse = torch.empty(rows, heads, dtype=torch.float32)
    function = build.code().attention_bf16
    function.restype = None
    parts = (q, kv, batch.row_start, batch.lengths, batch.page_table)
    function(
        *(ctypes.c_void_p(part.data_ptr()) for part in parts), batch.num_sequences,
        batch.page_table.shape[1], heads, kv.shape[1], width, rank,
        ctypes.c_void_p(out.data_ptr()), int(out.dtype == torch.float32),
        ctypes.c_void_p(lse.data_ptr()), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse
