"""Routed experts of bfloat16 on the CPU: one packed product an expert that has tokens."""

from __future__ import annotations

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated, order_by_expert, weighted_sum


class PackedExperts:
    """As `reference.experts.StackedExperts`; bfloat16 only. Keeps packed copies of the weights."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = [onednn.pack(weight) for weight in gate_up]
        self._down = [onednn.pack(weight) for weight in down]

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see the reference."""
        order = order_by_expert(experts)
        counts = torch.bincount(order.sorted_experts, minlength=len(self._down)).tolist()
        sizes = [count for count in counts if count]
        used = [expert for expert, count in enumerate(counts) if count]
        rows = torch.split(x.index_select(0, order.tokens), sizes)
        first = [
            onednn.linear(part, self._gate_up[expert], None)
            for part, expert in zip(rows, used, strict=True)
        ]
        inner = torch.split(gated(torch.cat(first)), sizes)
        second = [
            onednn.linear(part, self._down[expert], None)
            for part, expert in zip(inner, used, strict=True)
        ]
        return weighted_sum(torch.cat(second), order, weights)
