"""Attention of many rows on the CPU with products of few and known shapes.

torch lets oneDNN multiply bfloat16, and oneDNN builds a primitive for every new shape. So keys are
padded to the ladder of `linear`, and rows are cut into pieces of few sizes. The last piece may
begin within the rows of the one before. `reference.mla` defines the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.paged import PagedSpan
from torch.nn import functional

PIECES = (1, 8, 64, 256)
"""The possible numbers of rows in a piece."""
_LEAST_KEYS = 64
_MOST_SCORES = 1 << 22
"""The most scores of a piece: 8 MiB in bfloat16."""


def mla_absorbed(
    q: torch.Tensor, kv: torch.Tensor, spans: Sequence[PagedSpan], rank: int
) -> torch.Tensor:
    """Return the attended latents, [rows, heads, rank]; see the reference."""
    heads, width = q.shape[1:]
    out = q.new_empty(*q.shape[:2], rank)
    later = _later(q)
    for span in spans:
        keys = _context(span, kv, q.dtype)
        for row, count, seen in _pieces(span, heads):
            piece = q[row : row + count].reshape(count * heads, width)
            into = out[row : row + count].view(count * heads, rank)
            _attend(piece, keys, keys[:, :rank], into, (count, seen), later)
    return out


def mla_expanded(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[PagedSpan],
    key_up: torch.Tensor,
    value_up: torch.Tensor,
) -> torch.Tensor:
    """Return the attended values, [rows, heads, value width]; see the reference.

    One head at a time, so the workspace is one head's keys and values and a bounded score matrix.
    """
    heads, rank, nope = key_up.shape
    out = q.new_empty(q.shape[0], heads, value_up.shape[1])
    queries = q.transpose(0, 1).contiguous()
    later = _later(q)
    for span in spans:
        cached = _context(span, kv, q.dtype)
        latent = cached[:, :rank].contiguous()
        keys = q.new_empty(cached.shape[0], q.shape[-1])
        keys[:, nope:] = cached[:, rank:]
        pieces = _pieces(span, 1)
        for head in range(heads):
            torch.mm(latent, key_up[head], out=keys[:, :nope])
            values = functional.linear(latent, value_up[head])
            for row, count, seen in pieces:
                piece, into = queries[head, row : row + count], out[row : row + count, head]
                _attend(piece, keys, values, into, (count, seen), later)
    return out


def multiply_once(key_up: torch.Tensor, value_up: torch.Tensor, rope: int, size: int) -> None:
    """Multiply once in every shape that contexts of `size` keys need, so that oneDNN has built all
    of them. `size`: a number that `keys_rung` returns. key_up, value_up: of a layer, see
    `mla_expanded`.
    """
    heads, rank, nope = key_up.shape
    like, value = key_up, value_up.shape[1]
    later = _later(like)
    cached, keys = like.new_zeros(size, rank + rope), like.new_zeros(size, nope + rope)
    latent = like.new_zeros(size, rank)
    torch.mm(latent, key_up[0], out=keys[:, :nope])
    values = functional.linear(latent, value_up[0])
    for count in PIECES:
        if count <= min(size, _most_rows(1, size)):
            q, out = like.new_zeros(count, nope + rope), like.new_empty(count, heads, value)
            _attend(q, keys, values, out[:, 0], (count, size), later)
        if count <= min(size, _most_rows(heads, size)):
            q, out = like.new_zeros(count * heads, rank + rope), like.new_empty(count * heads, rank)
            _attend(q, cached, cached[:, :rank], out, (count, size), later)


def linear_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return each head's `x @ weight.T`, [rows, heads, out]; see `reference.linear`."""
    rows = x.shape[0]
    missing = onednn.rung(rows) - rows
    x = functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x.contiguous()
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:rows]


def keys_rung(context: int) -> int:
    """Return the number of keys to which `context` keys are padded."""
    return max(_LEAST_KEYS, onednn.rung(context))


def keys_rungs(most_context: int) -> list[int]:
    """Return the ladder of keys up to the rung of `most_context`."""
    return sorted({max(_LEAST_KEYS, rung) for rung in onednn.rungs(most_context)})


def cuts(rows: int, most: int) -> list[tuple[int, int]]:
    """Return (begin, count) of pieces that hold `rows` rows. Counts are from `PIECES`, at most
    `most` if possible: pieces of one size, then smaller ones. The last piece may begin before the
    end of the one before.
    """
    *_, small, large = (1, *(size for size in PIECES if size <= min(rows, most) or size == 1))
    found, begin = [], 0
    while begin < rows:
        count = large if 2 * (rows - begin) > large else small
        first = min(begin, rows - count)
        found.append((first, count))
        begin = first + count
    return found


def _pieces(span: PagedSpan, heads: int) -> list[tuple[int, int, int]]:
    """Return (first row, rows, keys that the last row sees) of each piece of a span."""
    most = _most_rows(heads, keys_rung(span.context))
    before = span.context - span.num_rows
    return [
        (span.first_row + begin, count, before + begin + count)
        for begin, count in cuts(span.num_rows, most)
    ]


def _context(span: PagedSpan, kv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the context's rows of `kv`, padded with zero rows up to the ladder's next rung."""
    rows = torch.empty(keys_rung(span.context), kv.shape[-1], dtype=dtype)
    at = 0
    for part in span.keys(kv):
        rows[at : at + part.shape[0]] = part
        at += part.shape[0]
    rows[at:] = 0
    return rows


def _most_rows(heads: int, size: int) -> int:
    """Return how many rows may be attended for at once over `size` keys."""
    return max(1, _MOST_SCORES // (heads * size))


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows_and_seen: tuple[int, int],
    later: torch.Tensor,
) -> None:
    """Attend for some rows (times heads) in `out`. The last of the rows sees the first
    `seen` keys.
    """
    rows, seen = rows_and_seen
    padded = keys_rung(seen)
    scores = q @ keys[:padded].t()
    if padded > seen:
        scores[:, seen:] = float("-inf")
    if rows > 1:  # adding -inf takes a third of the time of filling by a mask
        own = scores.view(rows, -1, padded)[:, :, seen - rows : seen]
        own.add_(later[:rows, None, :rows])
    torch.mm(torch.softmax(scores, dim=-1), values[:padded], out=out)


def _later(like: torch.Tensor) -> torch.Tensor:
    """Return -inf where the key (column) comes after the query (row), else 0."""
    return like.new_full((PIECES[-1], PIECES[-1]), float("-inf")).triu_(1)
