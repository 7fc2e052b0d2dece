"""Routed experts whose weights stay in the checkpoint's own quantized form."""

from __future__ import annotations

import torch
from mooncake_kernels.reference.experts import StackedExperts, gated, order_by_expert
from mooncake_kernels.reference.fp8 import quantize_rows, widen_blocks, widen_rows

INT4_GROUP = 32


class Fp8Experts:
    """Experts in e4m3 with 128 x 128 blocks; activations are quantized in groups of 128 columns.

    gate_up: [experts, 2, inner, hidden] with gate_up_factors [experts, 2, ceil(inner / 128),
    ceil(hidden / 128)]; down: [experts, hidden, inner] with down_factors likewise. Factors float32.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_factors: torch.Tensor,
        down: torch.Tensor,
        down_factors: torch.Tensor,
    ) -> None:
        self._gate_up = gate_up, gate_up_factors
        self._down = down, down_factors

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        return [part[number] for part in (*self._gate_up, *self._down)]

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `experts.StackedExperts`.

        The gated product is rounded to x's dtype before it is quantized for the second product.
        """
        order = order_by_expert(experts)
        rows = widen_rows(*quantize_rows(x)).index_select(0, order.tokens)
        out = torch.zeros(rows.shape[0], x.shape[1], device=x.device)
        for expert in sorted(set(order.sorted_experts.tolist())):
            if expert < 0:  # another rank's
                continue
            mine = order.sorted_experts == expert
            gate_up = widen_blocks(self._gate_up[0][expert], self._gate_up[1][expert])
            inner = gated(rows[mine] @ gate_up.flatten(0, 1).t()).to(x.dtype)
            down = widen_blocks(self._down[0][expert], self._down[1][expert])
            out[mine] = widen_rows(*quantize_rows(inner)) @ down.t()
        return (out[order.places] * weights[..., None]).sum(dim=1).to(x.dtype)


class Int4Experts:
    """Experts in symmetric INT4 groups of 32 columns (compressed-tensors `pack-quantized`).

    gate_up: [experts, 2, inner, hidden / 8] int32, the first column in the lowest four bits, stored
    plus 8, with gate_up_scales [experts, 2, inner, hidden / 32] of x's dtype. down: [experts,
    hidden, inner / 8] with down_scales likewise. Only weights are quantized; products are in x's
    dtype.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
    ) -> None:
        wide = widen_int4(gate_up, gate_up_scales).flatten(1, 2)
        self._experts = StackedExperts(wide, widen_int4(down, down_scales))

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        return self._experts.slot(number)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `experts.StackedExperts`."""
        return self._experts(x, experts, weights)


def int4_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes 0 to 15 of int32 words [..., words] as uint8 [..., 8 * words]."""
    octets = packed.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def widen_int4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [..., columns] in the dtype of `scales` [..., columns / 32]."""
    codes = int4_codes(packed).float() - 8
    return (codes * scales.float().repeat_interleave(INT4_GROUP, dim=-1)).to(scales.dtype)
