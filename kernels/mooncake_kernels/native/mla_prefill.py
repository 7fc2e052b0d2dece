"""Causal attention of many rows over paged latent KV, in the expanded form: by AMX's tiles if the
CPU has them, else by oneDNN's products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_kernels.native import build
from mooncake_kernels.native.packed import at, function
from mooncake_kernels.onednn import mla as onednn
from mooncake_kernels.reference.paged import PagedSpan

_WORD = 32


def by_tiles(*widths: int) -> bool:
    """Return whether tiles compute bfloat16 attention of these widths here."""
    whole = not any(width % _WORD for width in widths)
    return whole and build.why_not() is None and build.isa() is build.AMX


def mla_expanded(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    key_up: torch.Tensor,
    value_up: torch.Tensor,
) -> torch.Tensor:
    """Like the reference."""
    heads, rank, nope = key_up.shape
    value, rope = value_up.shape[1], kv.shape[-1] - rank
    same = {q.dtype, kv.dtype, key_up.dtype, value_up.dtype} == {torch.bfloat16}
    if not same or not by_tiles(rank, nope, rope, value):
        return onednn.mla_expanded(q, kv, spans, key_up, value_up)
    assert kv.is_contiguous()
    q, key_up, value_up = q.contiguous(), key_up.contiguous(), value_up.contiguous()
    out = q.new_empty(q.shape[0], heads, value)
    call = function("mla_expanded_bf16")
    for span in spans:
        padded = -(-span.context // _WORD) * _WORD
        room = q.new_empty(padded, 2 * rank + rope)
        call(
            at(q[span.first_row]), at(kv), at(span.pages), span.block_tokens, span.num_rows,
            span.context, heads, rank, nope, rope, value, at(key_up), at(value_up), at(room),
            at(out[span.first_row]), torch.get_num_threads(),
        )  # fmt: skip
    return out
