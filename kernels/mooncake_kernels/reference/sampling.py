"""Chooses tokens from rows of logits on the device, each row by its own settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_SCALED = -86.0
"""A token whose probability, relative to the best token's, is below the exponential of this need
not be drawn. On a CPU, exponentials of less than -87.3 are subnormal numbers and take 30 times as
long.
"""


@dataclass(frozen=True)
class DrawSettings:
    """The settings of each row, each of shape [rows].

    temperature: float32, 0 = the most likely token (the lowest id among equals). top_k: int32, 0 =
    off. top_p: float64, 1 = off. min_p: float64, 0 = off. uniform: float64 in [0, 1).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


@dataclass(frozen=True)
class Penalties:
    """The penalties of each row, each of shape [rows] float32; 1, 0 and 0 are off."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True)
class MostLikely:
    """Natural-log probabilities under the softmax of rows of logits.

    best: float32 [rows, most], the most likely first. ids: int64, the tokens of `best`. own:
    float32 [rows], of the row's own token. ranks: int64 [rows], its place, 1 = the most likely.
    """

    best: torch.Tensor
    ids: torch.Tensor
    own: torch.Tensor
    ranks: torch.Tensor


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, penalties: Penalties
) -> None:
    """Apply penalties to `logits` [rows, vocab] float32, in place.

    seen: [rows, vocab] bool, the tokens of prompt or output. Their logits are divided by
    `repetition` if positive, else multiplied. counts: [rows, vocab] int32, for the output.
    `frequency` times the count is subtracted, and `presence` if the count is not zero.
    """
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    adjusted = torch.where(seen, repeated, logits)
    times = counts.float()
    adjusted -= penalties.frequency[:, None] * times + penalties.presence[:, None] * times.clamp(
        max=1.0
    )
    logits.copy_(adjusted)


def mask(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Set the tokens of `logits` [rows, vocab] float32 that are not allowed to minus infinity, in
    place. allowed: uint8 [rows, (vocab + 7) // 8], one bit for each token, the lowest first.
    """
    rows, vocab = logits.shape
    numbers = torch.arange(256, device=logits.device)
    is_off = (numbers[:, None] >> numbers[:8]) & 1 == 0  # of each byte its bits
    forbidden = is_off.index_select(0, allowed.reshape(-1).int()).view(rows, -1)
    logits.masked_fill_(forbidden[:, :vocab], -torch.inf)


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Return one token id per row of `logits` [rows, vocab] float32: int64 [rows].

    Temperature comes first; then min-p, top-k, and top-p over what those left. Each filter is a
    threshold: tokens that tie with the last one kept stay. The token is the first whose cumulative
    weight, in order of token id, exceeds `uniform` times the whole.
    """
    tokens = [_draw_row(row, settings, place) for place, row in enumerate(logits)]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _draw_row(row: torch.Tensor, settings: DrawSettings, place: int) -> int:
    temperature = float(settings.temperature[place])
    if temperature == 0:
        return int((row == row.max()).nonzero()[0])
    scaled = (row - row.max()) / settings.temperature[place]
    threshold = settings.min_p[place].log().to(scaled.dtype)
    descending = scaled.sort(descending=True).values
    top_k, top_p = int(settings.top_k[place]), float(settings.top_p[place])
    if 0 < top_k < row.numel():
        threshold = torch.maximum(threshold, descending[top_k - 1])
    if top_p < 1:
        masses = descending.double().exp().masked_fill(descending < threshold, 0.0)
        before = masses.cumsum(0) - masses
        num_kept = max(1, int((before < top_p * masses.sum()).sum()))
        threshold = torch.maximum(threshold, descending[num_kept - 1])
    cumulative = scaled.double().exp().masked_fill(scaled < threshold, 0.0).cumsum(0)
    above = (cumulative > float(settings.uniform[place]) * cumulative[-1]).nonzero()
    return int(above[0])


def most_likely(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> MostLikely:
    """Return the `most` most likely tokens of each row of `logits` [rows, vocab] float32, and how
    likely the row's token in `tokens` [rows] is. The order of tokens that tie is undefined.
    """
    chosen = logits.gather(1, tokens[:, None])
    best = logits.topk(most, dim=-1)
    # As logsumexp computes it; the largest are known already.
    sums = (logits - best.values[:, :1]).exp_().sum(dim=-1, keepdim=True)
    whole = sums.log_() + best.values[:, :1]
    ranks = (logits > chosen).sum(dim=-1).add_(1)
    return MostLikely(best.values - whole, best.indices, (chosen - whole).squeeze(1), ranks)
