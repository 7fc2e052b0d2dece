"""The mixture-of-experts layer: router, routed experts, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mooncake_kernels.dispatch import REFERENCE, kernel
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.router import Routing

from mooncake.base import ModelSpec
from mooncake.model.layers.linear import GatedMlp


@dataclass(frozen=True)
class MoeWeights:
    """Weights of one layer in the model's dtype, except the router's in float32.

    router: [experts, hidden]; router_bias: [experts]; gate_up: [experts, 2 * inner, hidden];
    down: [experts, hidden, inner]; shared: None when the model has no shared expert.
    """

    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: GatedMlp | None


class Moe:
    """`x + shared(h) + sum of the chosen experts of h`."""

    def __init__(self, spec: ModelSpec, weights: MoeWeights) -> None:
        self._routing = Routing(
            top_k=spec.num_experts_per_tok,
            num_groups=spec.n_group,
            top_groups=spec.topk_group,
            normalize=spec.norm_topk_prob,
            scale=spec.routed_scaling_factor,
        )
        self._router = weights.router
        self._router_bias = weights.router_bias
        self._shared = weights.shared
        backend = "onednn" if onednn.supported(weights.gate_up) else REFERENCE
        self._experts = kernel("experts", backend)(weights.gate_up, weights.down)
        self._route = kernel("route")

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + moe(x)`; x and to: [rows, hidden]."""
        experts, weights = self._route(x, self._router, self._router_bias, self._routing)
        total: torch.Tensor = self._experts(x, experts, weights).add_(to)
        return total if self._shared is None else self._shared.add(x, total)
