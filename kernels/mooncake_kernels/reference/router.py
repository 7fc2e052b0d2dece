"""The `noaux_tc` router: sigmoid scores, a bias that only affects the choice, optional expert
groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

_NO_DIVISION_BY_ZERO = 1e-20
_BEST_OF_GROUP = 2


@dataclass(frozen=True)
class Routing:
    """How experts are chosen (DeepSeek-V3, arXiv 2412.19437 section 2.1.2)."""

    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts [tokens, k] int64, weights [tokens, k] float32) of each token, unordered.

    x: [tokens, hidden] of any float dtype; weight: [experts, hidden], float32 or of x's dtype;
    bias: [experts] float32. Scores are `sigmoid(weight x)`, with products summed in float32 (those
    of bfloat16 numbers are exact). Experts are chosen by score + bias. With several groups, they
    come only from the `top_groups` groups whose two best experts have the highest sums. Weights are
    the plain scores of the chosen experts, normalized to sum 1 if `normalize`, times `scale`.
    """
    return choose(functional.linear(x.float(), weight.float()), bias, routing)


def choose(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `route`'s result for the router's `logits` [tokens, experts] float32."""
    return choose_scored(logits.sigmoid(), bias, routing)


def choose_scored(
    scores: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `route`'s result for scores [tokens, experts] float32."""
    choice = scores + bias
    if routing.num_groups > 1:
        choice = _only_best_groups(choice, routing)
    experts = torch.topk(choice, routing.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_DIVISION_BY_ZERO)
    return experts, weights * routing.scale


def _only_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    grouped = choice.view(choice.shape[0], routing.num_groups, -1)
    best = min(_BEST_OF_GROUP, grouped.shape[-1])
    totals = grouped.topk(best, dim=-1).values.sum(dim=-1)
    kept = totals.topk(routing.top_groups, dim=-1, sorted=False).indices
    closed = torch.ones_like(totals, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
