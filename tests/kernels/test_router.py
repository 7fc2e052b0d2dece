"""The choice of experts against its definition: groups, ties, odd numbers of experts."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.router import Routing

from tests.support.kernels.gates import DEVICE

CASES = [
    (5, Routing(2, 1, 1, True, 1.0)),
    (384, Routing(8, 1, 1, True, 2.827)),
    (24, Routing(3, 4, 2, False, 2.5)),
    (12, Routing(4, 12, 5, True, 1.5)),
    (21, Routing(6, 3, 2, True, 1.0)),
    (1, Routing(1, 1, 1, True, 1.0)),
]


@pytest.mark.parametrize(("num_experts", "routing"), CASES)
def test_same_experts_and_weights(num_experts: int, routing: Routing) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(7, num_experts, generator=generator).to(DEVICE)
    bias = (torch.randn(num_experts, generator=generator) * 0.3).to(DEVICE)
    experts, weights = kernel("choose", "triton")(logits, bias, routing)
    wanted_experts, wanted_weights = kernel("choose")(logits, bias, routing)
    order, wanted_order = experts.argsort(), wanted_experts.argsort()
    assert torch.equal(experts.gather(1, order), wanted_experts.gather(1, wanted_order))
    off = weights.gather(1, order) - wanted_weights.gather(1, wanted_order)
    assert float(off.abs().max()) <= 4e-7 * routing.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_takes_the_router_itself(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 16, generator=generator).to(DEVICE, torch.bfloat16)
    weight = torch.randn(9, 16, generator=generator).to(DEVICE, dtype)
    bias = torch.zeros(9, device=DEVICE)
    routing = Routing(2, 1, 1, True, 1.0)
    experts, weights = kernel("route", "triton")(x, weight, bias, routing)
    wanted, wanted_weights = kernel("route")(x, weight, bias, routing)
    assert torch.equal(experts.sort().values, wanted.sort().values)
    torch.testing.assert_close(weights.sort().values, wanted_weights.sort().values)


def test_a_tie_takes_the_lower_number() -> None:
    logits = torch.zeros(2, 10, device=DEVICE)
    routing = Routing(3, 1, 1, True, 1.0)
    experts, _ = kernel("choose", "triton")(logits, torch.zeros(10, device=DEVICE), routing)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_scores_of_zero_are_not_divided_by_zero() -> None:
    logits = torch.full((1, 4), -200.0, device=DEVICE)
    routing = Routing(2, 1, 1, True, 1.0)
    _, weights = kernel("choose", "triton")(logits, torch.zeros(4, device=DEVICE), routing)
    assert weights.tolist() == [[0.0, 0.0]]


def test_no_tokens() -> None:
    experts, weights = kernel("choose", "triton")(
        torch.empty(0, 8, device=DEVICE),
        torch.zeros(8, device=DEVICE),
        Routing(2, 1, 1, True, 1.0),
    )
    assert tuple(experts.shape) == tuple(weights.shape) == (0, 2)
