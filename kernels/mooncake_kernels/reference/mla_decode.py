"""Absorbed MLA over paged latent KV, with the batch on the device. It also returns the
log-sum-exp.
"""

from __future__ import annotations

import torch
from mooncake_kernels.reference.paged_batch import PagedBatch


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    rank: int,
    kv_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (attended latents [rows, heads, rank], lse [rows, heads] float32).

    out_dtype: the dtype of the latents, q's or float32 (for a merge); None: q's.

    q: [rows, heads, rank + rope] queries in the latent space, scaled for the softmax.

    kv: [pages, block_tokens, rank + rope]; float8_e4m3fn rows stand for `kv_scale` times themselves
    (kv_scale is 1 for other dtypes). Row i of a sequence with n rows and length L sees its first L
    - n + 1 + i tokens. lse is the natural log of the sum of exponentials of a row's scores, for
    merging with attention over other keys. Rows that see nothing, or belong to no sequence, are 0
    with lse -inf.
    """
    rows, heads, width = q.shape
    out = torch.zeros(rows, heads, rank, dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), device=q.device)
    starts, lengths = batch.row_start.tolist(), batch.lengths.tolist()
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        if not length or begin == end:
            continue
        pages = batch.page_table[sequence, : -(-length // kv.shape[1])].long()
        keys = kv.index_select(0, pages).reshape(-1, width)[:length].float() * kv_scale
        scores = torch.einsum("rhw,kw->rhk", q[begin:end].float(), keys)
        seen = torch.arange(end - begin, device=q.device) + length - (end - begin) + 1
        hidden = torch.arange(length, device=q.device)[None] >= seen[:, None]
        scores.masked_fill_(hidden[:, None], float("-inf"))
        lse[begin:end] = scores.logsumexp(dim=-1)
        weights = (scores - lse[begin:end, :, None]).exp().nan_to_num_(0.0)
        out[begin:end] = torch.einsum("rhk,kc->rhc", weights, keys[:, :rank])
    return out.to(out_dtype or q.dtype), lse
