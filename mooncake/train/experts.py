"""The mixture-of-experts layer for training, and how its load is balanced.

The bias update of `noaux_tc` balances the load (DeepSeek-V3, arXiv 2412.19437 section 2.1.2); there
is no balance loss. A layer's experts are three stacked tensors (gates, ups and downs), so that the
optimizer treats them in one batch. A checkpoint has one tensor for each expert.
"""

from __future__ import annotations

from threading import Lock

import torch
from mooncake_kernels.reference.router import Routing, choose
from torch import nn
from torch.nn import functional

from mooncake.base import ModelSpec
from mooncake.train.parts import GatedMlp, gated, joined, products, spread

_ROWS = 128
"""An expert's rows are filled up to a multiple of this, because oneDNN compiles a product anew for
each number of rows that it has not seen. Products in float32 are not compiled.
"""


class Stack(nn.Module):
    """One matrix for each expert: [experts, out, in] float32."""

    def __init__(self, num_experts: int, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, num_out, num_in))


class Experts(nn.Module):
    """The routed experts of a layer."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Stack(num_experts, hidden, inner)
        self.up_proj = Stack(num_experts, hidden, inner)
        self.down_proj = Stack(num_experts, inner, hidden)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts of x [tokens, hidden], in float32.

        chosen, weights: [tokens, k].
        """
        form = self.chosen_only if x.device.type == "cpu" else self.all_at_once
        return form(x, chosen, weights)

    def all_at_once(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum, computed as one wide layer of all experts, where those that are not
        chosen weigh nothing.

        A GPU has this sooner than many small products whose sizes the host has to read first.
        """
        gates, ups, downs = self._weights(x.dtype)
        num, inner, _ = gates.shape
        shares = weights.new_zeros(len(x), num).scatter(1, chosen, weights).to(x.dtype)
        made = functional.silu(functional.linear(x, gates.flatten(0, 1)))
        made = made * functional.linear(x, ups.flatten(0, 1))
        weighted = (made.view(-1, num, inner) * shares[:, :, None]).flatten(1)
        return functional.linear(weighted, downs.transpose(0, 1).flatten(1)).float()

    def chosen_only(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum, computed expert by expert for the tokens that chose it."""
        num, k = self.gate_proj.weight.shape[0], chosen.shape[1]
        filled = 1 if x.dtype == torch.float32 else _ROWS
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=num)
        rounded = (counts + filled - 1) // filled * filled
        # The places of an expert's rows, one after the other, begin at a multiple of `filled`.
        shift = (rounded.cumsum(0) - rounded) - (counts.cumsum(0) - counts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order)) + shift[flat[order]]
        sizes = rounded.tolist()
        sources = torch.arange(sum(sizes)) % len(x)
        sources[places] = torch.arange(len(places)) // k
        # Rows that only fill weigh nothing, so that they change no gradient.
        shares = weights.new_zeros(len(sources)).index_copy(0, places, weights.flatten())
        gates, ups, downs = self._weights(x.dtype)
        wide = products(spread(x, sources, places), torch.cat((gates, ups), dim=1), sizes)
        made = products(gated(wide, shares), downs, sizes)
        return joined(made, sources, places, k)

    def _weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gates, ups, downs = (
            stack.weight.to(dtype) for stack in (self.gate_proj, self.up_proj, self.down_proj)
        )
        return gates, ups, downs


class Router(nn.Module):
    """Chooses experts by sigmoid scores and a bias that gradients do not change."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._routing = Routing(
            top_k=spec.num_experts_per_tok,
            num_groups=spec.n_group,
            top_groups=spec.topk_group,
            normalize=spec.norm_topk_prob,
            scale=spec.routed_scaling_factor,
        )
        self.weight = nn.Parameter(torch.empty(spec.n_routed_experts, spec.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(spec.n_routed_experts))
        self.e_score_correction_bias: torch.Tensor
        self._counting = Lock()
        self.register_buffer("load", torch.zeros(spec.n_routed_experts), persistent=False)
        self.load: torch.Tensor
        """How many tokens chose each expert since the bias last changed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (experts, weights) of x [tokens, hidden], [tokens, k] each."""
        logits = functional.linear(x.float(), self.weight)
        chosen, weights = choose(logits, self.e_score_correction_bias, self._routing)
        if self.training:
            counted = torch.zeros_like(logits).scatter_(1, chosen, 1.0).sum(0)
            with self._counting:
                self.load += counted
        return chosen, weights

    @torch.no_grad()
    def balance(self, rate: float) -> torch.Tensor:
        """Move the bias towards the experts with fewer tokens and reset the counts.

        Returns the busiest expert's load as a multiple of the mean, [].
        """
        mean = self.load.mean()
        self.e_score_correction_bias += rate * torch.sign(mean - self.load)
        worst = self.load.max() / mean.clamp(min=1)
        self.load.zero_()
        return worst


class Moe(nn.Module):
    """`shared(x) + sum of the chosen experts of x`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.moe_intermediate_size
        self.gate = Router(spec)
        self.experts = Experts(spec.n_routed_experts, hidden, inner)
        self.shared_experts = (
            GatedMlp(hidden, inner * spec.n_shared_experts) if spec.n_shared_experts else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] float32 for x of that shape."""
        total: torch.Tensor = self.experts(x, *self.gate(x))
        if self.shared_experts is not None:
            total = total + self.shared_experts(x)
        return total
