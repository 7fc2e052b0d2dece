"""The router's choice in one launch, with one program per token (contract: `reference.router`).

Experts are in a [groups, experts of a group] tile, both padded to powers of two, so that one code
serves group limits and the plain case. The k best are taken one after another, because k is small
and a maximum of 512 numbers costs less than any sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from mooncake_kernels.reference.router import Routing
from mooncake_kernels.triton.device import pow2

_NO_DIVISION_BY_ZERO = tl.constexpr(1e-20)


@triton.jit
def _best_groups(
    choice, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, PG: tl.constexpr
):
    """Return [padded groups] int1: whether a group is among those whose two best experts have the
    highest sums.
    """
    j = tl.arange(0, choice.shape[1])[None, :]
    first = tl.max(choice, 1)
    totals = first
    if SIZE > 1:
        rest = tl.where(j == tl.argmax(choice, 1)[:, None], float("-inf"), choice)
        totals = first + tl.max(rest, 1)
    g = tl.arange(0, PG)
    totals = tl.where(g < GROUPS, totals, float("-inf"))
    open_groups = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        taken = g == tl.argmax(totals, 0)
        open_groups = open_groups | taken
        totals = tl.where(taken, float("-inf"), totals)
    return open_groups


@triton.jit
def _choose(
    logits, bias, experts, weights, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr, PG: tl.constexpr, PS: tl.constexpr, PK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, PG)[:, None]
    j = tl.arange(0, PS)[None, :]
    expert = g * SIZE + j
    there = (g < GROUPS) & (j < SIZE)
    logit = tl.load(logits + token * (GROUPS * SIZE) + expert, mask=there, other=0.0)
    decay = tl.exp(-tl.abs(logit))
    score = tl.where(logit >= 0, 1.0, decay) / (1.0 + decay)
    choice = tl.where(there, score + tl.load(bias + expert, mask=there, other=0.0), float("-inf"))
    if GROUPS > 1:
        open_groups = _best_groups(choice, GROUPS, SIZE, TOP_GROUPS, PG)
        choice = tl.where(open_groups[:, None], choice, float("-inf"))
    flat_choice = tl.reshape(choice, [PG * PS])
    flat_score = tl.reshape(score, [PG * PS])
    flat_expert = tl.reshape(expert + 0 * j, [PG * PS])
    i = tl.arange(0, PG * PS)
    k = tl.arange(0, PK)
    ids = tl.zeros([PK], tl.int32)
    values = tl.zeros([PK], tl.float32)
    for place in tl.static_range(TOP_K):
        taken = i == tl.argmax(flat_choice, 0)
        ids = tl.where(k == place, tl.sum(tl.where(taken, flat_expert, 0), 0), ids)
        values = tl.where(k == place, tl.sum(tl.where(taken, flat_score, 0.0), 0), values)
        flat_choice = tl.where(taken, float("-inf"), flat_choice)
    if NORMALIZE:
        values = values / (tl.sum(values, 0) + _NO_DIVISION_BY_ZERO)
    tl.store(experts + token * TOP_K + k, ids.to(tl.int64), mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, values * scale, mask=k < TOP_K)


def choose(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts [tokens, k] int64, weights [tokens, k] float32); see the reference.

    Among experts that tie, the lowest number wins. The best experts come first.
    """
    tokens, num_experts = logits.shape
    size = num_experts // routing.num_groups
    experts = torch.empty(tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits.contiguous(), bias, experts, weights, routing.scale,
            GROUPS=routing.num_groups, SIZE=size, TOP_GROUPS=routing.top_groups,
            TOP_K=routing.top_k, NORMALIZE=routing.normalize, PG=pow2(routing.num_groups),
            PS=pow2(size), PK=pow2(routing.top_k), num_warps=1,
        )  # fmt: skip
    return experts, weights


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts and weights; see the reference. The library computes the
    product.
    """
    if weight.dtype == torch.float32 or x.device.type == "cpu":
        return choose(functional.linear(x.float(), weight.float()), bias, routing)
    return choose(torch.mm(x, weight.t(), out_dtype=torch.float32), bias, routing)
