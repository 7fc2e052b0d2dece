"""Routed experts: tokens are sorted by expert, and each expert computes all of its tokens
at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

_GROUPED_MM_ALIGNMENT = 16


@dataclass(frozen=True)
class ExpertOrder:
    """The (token, choice) pairs of a batch, sorted by expert. Pairs of one expert stay in token
    order.

    `tokens` [pairs]: the token of each sorted pair. `places` [tokens, k]: the place of each pair.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    sorted_experts: torch.Tensor


def order_by_expert(experts: torch.Tensor) -> ExpertOrder:
    """Return the expert order of `experts` [tokens, k] int64."""
    num_choices = experts.shape[1]
    sorted_experts, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return ExpertOrder(order // num_choices, places.view_as(experts), sorted_experts)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `gate_up` [rows, 2 * inner] as [rows, inner]."""
    inner = gate_up.shape[-1] // 2
    return functional.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])


def weighted_sum(outputs: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of its experts' `outputs` [pairs, hidden] by `weights` [tokens, k].

    One gather, product and sum: an embedding bag whose table is the sorted outputs.
    """
    return functional.embedding_bag(
        order.places, outputs, mode="sum", per_sample_weights=weights.to(outputs.dtype)
    )


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return each row times its group's matrix, [rows, out].

    rows: [rows, in]; weights: [groups, in, out]; ends: [groups] int32, where each group's rows end.
    `torch.nn.functional.grouped_mm` needs rows of whole 16 bytes; other widths use a plain loop.
    """
    widths = rows.shape[1] | weights.shape[2]  # a multiple of what both are multiples of
    if widths * rows.element_size() % _GROUPED_MM_ALIGNMENT == 0:
        return functional.grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        out[begin:end] = rows[begin:end] @ weights[group]
        begin = end
    return out


class StackedExperts:
    """All experts of a layer in two tensors.

    gate_up: [experts, 2 * inner, hidden], the gate's rows first; down: [experts, hidden, inner].
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = gate_up.transpose(1, 2)
        self._down = down.transpose(1, 2)
        self._ids = torch.arange(gate_up.shape[0], device=gate_up.device)

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        return [self._gate_up[number], self._down[number]]

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden] in x's dtype.

        x: [tokens, hidden]; experts: [tokens, k] int64, below 0 when another rank has the expert,
        which adds nothing; weights: [tokens, k] float32.
        """
        order = order_by_expert(experts)
        ends = torch.searchsorted(order.sorted_experts, self._ids, right=True).to(torch.int32)
        tokens, others = order.tokens, 0
        if not experts.is_cuda and len(tokens) and order.sorted_experts[0] < 0:
            others = int((order.sorted_experts < 0).sum())
            tokens, ends = tokens[others:], ends - others
        rows = x.index_select(0, tokens)
        inner = gated(grouped_product(rows, self._gate_up, ends))
        outputs = grouped_product(inner, self._down, ends)
        if experts.is_cuda:  # the host does not know how many: the first expert computes
            outputs = outputs.masked_fill_(order.sorted_experts[:, None] < 0, 0)
        elif others:
            outputs = torch.cat((outputs.new_zeros(others, outputs.shape[1]), outputs))
        return weighted_sum(outputs, order, weights)
