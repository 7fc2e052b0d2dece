"""Chooses tokens on the CPU without a sort, with one call for all rows."""

from __future__ import annotations

import ctypes

import torch

from mooncake_kernels.native.packed import at, function
from mooncake_kernels.reference.sampling import LEAST_SCALED, DrawSettings, MostLikely, Penalties


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Like the reference, with these differences: weights are float32 and summed in float64, those
    of a nucleus in another order, and tokens less likely than `LEAST_SCALED` are not drawn.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    greedy = settings.temperature == 0
    best = logits.max(dim=-1)
    scaled = logits.contiguous() - best.values[:, None]
    scaled /= settings.temperature.masked_fill(greedy, 1.0)[:, None]
    weights = scaled.clamp_(min=LEAST_SCALED - 1).exp()
    least = settings.min_p.log().float().clamp_(min=LEAST_SCALED)
    top_k, top_p, uniform = (
        each.contiguous() for each in (settings.top_k, settings.top_p, settings.uniform)
    )
    function("draw_rows")(
        at(scaled), at(weights), at(least), at(top_k), at(top_p), at(uniform),
        rows, vocab, at(tokens), torch.get_num_threads(),
    )  # fmt: skip
    return torch.where(greedy, best.indices, tokens)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, penalties: Penalties
) -> None:
    """Like the reference, to the bit. All tensors are contiguous."""
    assert logits.is_contiguous()
    each = [
        part.contiguous()
        for part in (penalties.repetition, penalties.presence, penalties.frequency)
    ]
    function("penalize_rows")(
        at(logits), at(seen), at(counts), *map(at, each), *logits.shape, torch.get_num_threads()
    )


def mask(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Like the reference. Both tensors are contiguous."""
    assert logits.is_contiguous()
    assert allowed.is_contiguous()
    function("mask_rows")(
        at(logits), at(allowed), allowed.shape[1], *logits.shape, torch.get_num_threads()
    )


def most_likely(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> MostLikely:
    """Like the reference, except for the rounding of a logarithm. Among tokens that tie, the lowest
    ids win.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    best = torch.empty(rows, most, dtype=torch.float32)
    ids = torch.empty(rows, most, dtype=torch.int64)
    own = torch.empty(rows, dtype=torch.float32)
    ranks = torch.empty(rows, dtype=torch.int64)
    function("most_likely_rows")(
        at(logits), ctypes.c_int64(logits.stride(0)), at(tokens), rows, vocab, most,
        at(best), at(ids), at(own), at(ranks), torch.get_num_threads(),
    )  # fmt: skip
    return MostLikely(best, ids, own, ranks)
