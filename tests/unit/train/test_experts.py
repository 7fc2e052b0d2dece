"""The experts of a layer against a plain loop, and the balance of their load."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mooncake.base import ModelSpec
from mooncake.train.experts import Experts, Router
from tests.support.model.tiny_models import truth


def test_experts_are_a_plain_loop() -> None:
    torch.manual_seed(0)
    experts = Experts(4, 10, 6)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(9, 10, requires_grad=True)
    chosen = torch.tensor([[0, 2], [2, 0], [3, 2]] * 3)  # nobody chooses expert 1
    weights = torch.rand(9, 2, requires_grad=True)
    rows = [torch.zeros(10) for _ in range(9)]
    for row in range(9):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            gate, up, down = (
                stack.weight[expert]
                for stack in (experts.gate_proj, experts.up_proj, experts.down_proj)
            )
            inner = functional.silu(gate @ x[row]) * (up @ x[row])
            rows[row] = rows[row] + weight * (down @ inner)
    wanted = torch.stack(rows)
    towards, learned = torch.randn(9, 10), [x, weights, *experts.parameters()]
    gradients = torch.autograd.grad(wanted, learned, towards)
    for form in (experts.chosen_only, experts.all_at_once):
        made = form(x, chosen, weights)
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
        own = torch.autograd.grad(made, learned, towards)
        torch.testing.assert_close(own, gradients, rtol=1e-3, atol=1e-4)
        # In bfloat16 the rows of an expert are filled up; what fills them changes no gradient.
        made = form(x.bfloat16(), chosen, weights)
        own = torch.autograd.grad(made, learned, towards)
        assert made.dtype == torch.float32
        for one, plain in zip((made, *own), (wanted, *gradients), strict=True):
            assert ((one - plain).norm() / plain.norm()).item() < 0.02


def router() -> Router:
    made = Router(ModelSpec.from_config(truth("plain").config.to_dict()))
    torch.nn.init.normal_(made.weight, std=0.02)
    return made.train()


def test_the_bias_moves_towards_idle_experts() -> None:
    made = router()
    made.load.copy_(torch.tensor([9.0, 1, 5, 5, 5, 5, 5, 5]))
    assert float(made.balance(0.01)) == pytest.approx(9 / 5)
    assert made.e_score_correction_bias.tolist() == pytest.approx([-0.01, 0.01, *[0] * 6])
    assert not made.load.any()


def test_balancing_evens_the_load() -> None:
    torch.manual_seed(0)
    made = router()
    made.e_score_correction_bias[0] = 0.3  # all would go there
    x = torch.randn(256, 64)
    loads = []
    for _ in range(60):
        made(x)
        loads.append(float(made.balance(0.01)))
    assert loads[0] > 2.5
    assert loads[-1] < 1.7


def test_evaluation_counts_no_load() -> None:
    made = router().eval()
    made(torch.randn(5, 64))
    assert not made.load.any()
