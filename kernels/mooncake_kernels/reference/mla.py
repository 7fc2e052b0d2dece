"""Multi-head latent attention over paged latent KV, in its two forms (DeepSeek-V2, 2405.04434).

A cached row is `[latent | key part]`: the normed latent (rank numbers), then the rotated key part
that all heads share. Absorbed: queries are moved into the latent space and attend to the cached
rows directly. Expanded: keys and values of each head are made from the latents. Both compute the
same function; the caller chooses the cheaper one. Scores are softmaxed in float32 and kept in the
input's dtype. Queries come scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mooncake_kernels.reference.paged import PagedSpan
from torch.nn import functional

_SCORES_PER_CHUNK = 1 << 22
"""Bounds the number of scores: 8 MiB in bfloat16."""
_MAX_CHUNK_ROWS = 256


def mla_absorbed(
    q: torch.Tensor, kv: torch.Tensor, spans: Sequence[PagedSpan], rank: int
) -> torch.Tensor:
    """Return the attended latents, [rows, heads, rank] in q's dtype.

    q: [rows, heads, rank + rope] scaled queries in the latent space; every row is in one span.
    kv: [pages, block_tokens, rank + rope], any float dtype.
    """
    out = q.new_empty(*q.shape[:2], rank)
    for span in spans:
        keys = [part.to(q.dtype) for part in span.keys(kv)]
        if span.num_rows == 1:
            _attend_one(q[span.first_row], keys, out[span.first_row])
        else:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            _attend_many(q[rows], _joined(keys), out[rows])
    return out


def _attend_one(q: torch.Tensor, keys: list[torch.Tensor], out: torch.Tensor) -> None:
    """Attend for one token that sees all keys, with heads as rows. The keys may stay in parts."""
    rank = out.shape[-1]
    if len(keys) == 1:
        probs = torch.softmax(q @ keys[0].t(), dim=-1)
        torch.mm(probs, keys[0][:, :rank], out=out)
        return
    probs = torch.softmax(torch.cat([q @ part.t() for part in keys], dim=-1), dim=-1)
    parts = torch.split(probs, [part.shape[0] for part in keys], dim=-1)
    torch.mm(parts[0], keys[0][:, :rank], out=out)
    for prob, part in zip(parts[1:], keys[1:], strict=True):
        out.addmm_(prob, part[:, :rank])


def _attend_many(q: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """Attend for several tokens, causally, with (token, head) pairs as rows, in chunks of
    tokens.
    """
    num_rows, heads, _ = q.shape
    context, rank = keys.shape[0], out.shape[-1]
    step = max(1, min(num_rows, _SCORES_PER_CHUNK // (heads * context)))
    later = _later(step, q)
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        seen = context - num_rows + end
        scores = q[begin:end].reshape(-1, q.shape[-1]) @ keys[:seen].t()
        _hide_later(scores.view(end - begin, heads, seen), later)
        probs = torch.softmax(scores, dim=-1)
        out[begin:end] = (probs @ keys[:seen, :rank]).view(end - begin, heads, rank)


def mla_expanded(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    key_up: torch.Tensor,
    value_up: torch.Tensor,
) -> torch.Tensor:
    """Return the attended values, [rows, heads, value width] in q's dtype.

    q: [rows, heads, nope + rope] scaled queries; every row is in one span.
    kv: [pages, block_tokens, rank + rope], any float dtype.
    key_up: [heads, rank, nope]; value_up: [heads, value width, rank]; both in q's dtype.

    One head at a time and queries in chunks, so the workspace is one head's keys and values and a
    bounded score matrix however long the context is.
    """
    heads, rank, nope = key_up.shape
    out = q.new_empty(q.shape[0], heads, value_up.shape[1])
    for span in spans:
        cached = _joined([part.to(q.dtype) for part in span.keys(kv)])
        latent, shared = cached[:, :rank].contiguous(), cached[:, rank:]
        rows = slice(span.first_row, span.first_row + span.num_rows)
        queries = q[rows].transpose(0, 1).contiguous()
        later = _later(min(span.num_rows, _MAX_CHUNK_ROWS), q)
        keys = q.new_empty(span.context, q.shape[-1])
        keys[:, nope:] = shared
        for head in range(heads):
            torch.mm(latent, key_up[head], out=keys[:, :nope])
            values = functional.linear(latent, value_up[head])
            _attend_head(queries[head], keys, values, out[rows, head], later)
    return out


def _attend_head(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    later: torch.Tensor,
) -> None:
    num_rows, context = q.shape[0], keys.shape[0]
    step = max(1, min(_MAX_CHUNK_ROWS, num_rows, _SCORES_PER_CHUNK // context))
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        seen = context - num_rows + end
        scores = q[begin:end] @ keys[:seen].t()
        _hide_later(scores[:, None], later)
        torch.mm(torch.softmax(scores, dim=-1), values[:seen], out=out[begin:end])


def _later(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Return [rows, rows]: -inf where the key (column) comes after the query (row), else 0."""
    return like.new_full((rows, rows), float("-inf")).triu_(1)


def _hide_later(scores: torch.Tensor, later: torch.Tensor) -> None:
    """Hide in scores [rows, heads, seen] the keys after the row's own. The last row sees all.

    Adding -inf takes a third of the time of filling with a mask.
    """
    rows, _, seen = scores.shape
    if rows > 1:
        scores[:, :, seen - rows :].add_(later[:rows, None, :rows])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
