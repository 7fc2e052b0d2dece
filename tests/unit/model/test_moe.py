"""The router against transformers' and both expert backends against a plain loop."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.router import Routing, route
from torch.nn import functional
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

HIDDEN, INNER = 48, 20  # INNER in bfloat16 is not a multiple of 16 bytes

needs_packing = pytest.mark.skipif(
    not onednn.supported(torch.zeros(1, 1, dtype=torch.bfloat16)),
    reason="this machine has no bfloat16 for oneDNN",
)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "top_groups", "normalize", "scale"),
    [
        (12, 3, 1, 1, True, 2.827),
        (16, 4, 4, 2, True, 2.5),
        (16, 6, 8, 4, False, 1.0),
        (8, 8, 1, 1, True, 1.0),
    ],
)
def test_the_router_equals_transformers(
    num_experts, top_k, groups, top_groups, normalize, scale
) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalize,
        routed_scaling_factor=scale,
    )
    reference = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        reference.weight.normal_()
        reference.e_score_correction_bias.normal_(std=0.5)
        x = torch.randn(200, HIDDEN)
        _, weights, experts = reference(x)
        routing = Routing(top_k, groups, top_groups, normalize, scale)
        found, found_weights = route(
            x, reference.weight, reference.e_score_correction_bias, routing
        )
    order, found_order = experts.argsort(dim=-1), found.argsort(dim=-1)
    assert torch.equal(experts.gather(1, order), found.gather(1, found_order))
    torch.testing.assert_close(
        weights.gather(1, order), found_weights.gather(1, found_order), atol=1e-6, rtol=1e-6
    )


def test_the_bias_chooses_but_does_not_weigh() -> None:
    x = torch.ones(1, 1)
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    bias = torch.tensor([0.0, -9.0, 9.0])
    experts, weights = route(x, weight, bias, Routing(2, 1, 1, True, 3.0))
    share = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    first, third = torch.sigmoid(torch.tensor([2.0, 0.0])).tolist()
    assert share == {
        0: pytest.approx(3 * first / (first + third)),
        2: pytest.approx(3 * third / (first + third)),
    }


def test_closed_groups_are_never_chosen() -> None:
    """The best single expert sits in a group whose two best sum lower: it must not be taken."""
    scores = torch.tensor([[4.0, -9.0, 1.0, 1.0]])
    experts, _ = route(torch.ones(1, 1), scores.t(), torch.zeros(4), Routing(2, 2, 1, True, 1.0))
    assert set(experts[0].tolist()) == {2, 3}


def loop(x, experts, weights, gate_up, down) -> torch.Tensor:
    """One token and one choice at a time, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        pytest.param("onednn", torch.bfloat16, marks=needs_packing),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 90])
def test_experts_equal_a_plain_loop(backend: str, dtype, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_experts, top_k = 6, 2
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator).div(7).to(dtype)
    down = torch.randn(num_experts, HIDDEN, INNER, generator=generator).div(4).to(dtype)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    # Expert 3 never has a token: empty groups must not shift the others.
    choices = torch.tensor([0, 1, 2, 4, 5])
    experts = torch.stack(
        [choices[torch.randperm(5, generator=generator)[:top_k]] for _ in range(num_tokens)]
    )
    weights = torch.rand(num_tokens, top_k, generator=generator)
    computing = kernel("experts", backend)(gate_up, down)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    everyone = torch.zeros_like(experts, dtype=torch.bool)
    # Other ranks have no expert, the even ones, or all.
    for others in (everyone, experts % 2 == 0, ~everyone):
        expected = loop(x, experts, weights.masked_fill(others, 0), gate_up, down)
        found = computing(x, experts.masked_fill(others, -1), weights)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=limit, rtol=limit)


@needs_packing
def test_packed_linear_equals_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, outs, ins in ((1, 33, 50), (5, 64, 48), (130, 17, 96)):
        weight, x, add, bias = (
            torch.randn(size, generator=generator).bfloat16()
            for size in ((outs, ins), (rows, ins), (rows, outs), (outs,))
        )
        packed = onednn.pack(weight)
        exact = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(
            onednn.linear(x, packed, bias).double(), exact, atol=0.06, rtol=0.01
        )
        torch.testing.assert_close(
            onednn.linear_add(x, packed, bias, add).double(),
            exact + add.double(),
            atol=0.06,
            rtol=0.01,
        )


def test_only_bfloat16_on_the_cpu_is_packed() -> None:
    assert not onednn.supported(torch.zeros(2, 2))
    assert not onednn.supported(torch.zeros(2, 2, dtype=torch.float16))
    assert not onednn.supported(torch.zeros(2, 2, dtype=torch.bfloat16, device="meta"))


def test_the_ladder_is_short_and_wastes_little() -> None:
    steps = onednn.rungs(2048)
    assert steps[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len(steps) == 22
    for rows in range(1, 2049):
        step = onednn.rung(rows)
        assert step == min(rung for rung in steps if rung >= rows)
        assert rows <= 64 or step - rows < max(64, rows // 4)


def test_rows_of_an_expert_are_cut_into_few_sizes() -> None:
    sizes = set()
    for rows in range(3000):
        cut = onednn.pieces(rows)
        sizes |= set(cut)
        padding = sum(cut) - rows
        assert 0 <= padding <= 25 + rows // 16
        assert len(cut) <= -(-rows // onednn.MOST_ROWS_OF_PIECE) + 4
    assert sizes == set(onednn.rungs(onednn.MOST_ROWS_OF_PIECE))
