"""Attention of many new tokens over expanded keys and values, several sequences in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpandedKeys:
    """Keys and values made from latents, one sequence after another, with any strides.

    nope: [keys, heads, nope]; rope: [keys, rope], shared by the heads; values: [keys, heads, value
    width].
    """

    nope: torch.Tensor
    rope: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class RaggedBatch:
    """Sequence s owns the rows from `row_start[s]` and the keys from `key_start[s]` up to the next
    sequence's.

    row_start, key_start: [seqs + 1] int32, ascending. first_seen: [seqs] int32: its row i sees its
    first `first_seen + i` keys. For a chunk of earlier keys this may be more than there are; then
    the row sees all. max_rows: the most rows of a sequence.
    """

    row_start: torch.Tensor
    key_start: torch.Tensor
    first_seen: torch.Tensor
    max_rows: int


def mla_prefill(
    q: torch.Tensor, keys: ExpandedKeys, batch: RaggedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [rows, heads, value width] in q's dtype, lse [rows, heads] float32).

    q: [rows, heads, nope + rope], scaled for the softmax. Rows that see no key are 0, lse -inf.
    """
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, keys.values.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("-inf"), device=q.device)
    row_start, key_start = batch.row_start.tolist(), batch.key_start.tolist()
    for sequence, seen in enumerate(batch.first_seen.tolist()):
        mine = slice(row_start[sequence], row_start[sequence + 1])
        there = slice(key_start[sequence], key_start[sequence + 1])
        if mine.start == mine.stop or there.start == there.stop:
            continue
        shared = keys.rope[there, None].expand(-1, heads, -1)
        whole = torch.cat((keys.nope[there], shared), dim=-1).float()
        scores = torch.einsum("rhw,khw->rhk", q[mine].float(), whole)
        limit = seen + torch.arange(mine.stop - mine.start, device=q.device)
        hidden = torch.arange(there.stop - there.start, device=q.device)[None] >= limit[:, None]
        scores.masked_fill_(hidden[:, None], float("-inf"))
        lse[mine] = scores.logsumexp(dim=-1)
        weights = (scores - lse[mine, :, None]).exp().nan_to_num_(0.0)
        out[mine] = torch.einsum("rhk,khv->rhv", weights, keys.values[there].float())
    return out.to(q.dtype), lse
