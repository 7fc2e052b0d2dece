"""The optimizer against plain references: SVD, the formulas of the paper, torch's own AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mooncake.base import ModelSpec
from mooncake.train.attention import Attention, Rows, attend
from mooncake.train.batches import packed
from mooncake.train.muon_clip import MuonClip, NormClip, Rates, clip_qk, is_muons, orthogonalize
from tests.support.model.tiny_models import truth

SHAPES = [(8, 8), (24, 96), (96, 24), (5, 24, 96), (3, 96, 24)]


def weight(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_keeps_directions_and_evens_lengths(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    matrices = weight(*shape).detach()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    made = u.mT @ orthogonalize(matrices, dtype) @ vh.mT
    lengths = made.diagonal(dim1=-2, dim2=-1)
    slack = 0 if dtype == torch.float32 else 0.1
    assert float(lengths.max()) < 1.3 + slack
    # A square random matrix has singular values near 0, which five rounds do not reach.
    if shape[-1] != shape[-2]:
        assert float(lengths.min()) > 0.6 - slack
    other = made - torch.diag_embed(lengths)
    assert float(other.abs().max()) < (1e-4 if dtype == torch.float32 else 0.1)


def test_a_stack_is_each_of_its_matrices() -> None:
    stack = weight(4, 12, 30).detach()
    each = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), each, rtol=1e-5, atol=1e-6)


def test_a_step_of_muon_is_the_papers() -> None:
    matrix, rates = weight(6, 10), Rates(weight_decay=0.1, momentum=0.9)
    optimizer = MuonClip([("layer.weight", matrix)], rates)
    wanted, momentum = matrix.detach().clone(), torch.zeros(6, 10)
    for step in range(3):
        matrix.grad = weight(6, 10, seed=step + 1).detach()
        optimizer.step(0.01)
        momentum = 0.9 * momentum + matrix.grad
        update = orthogonalize(matrix.grad + 0.9 * momentum) * 0.2 * math.sqrt(10)
        wanted = wanted - 0.01 * (update + 0.1 * wanted)
    torch.testing.assert_close(matrix.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_an_update_has_the_size_of_adams() -> None:
    matrix = nn.Parameter(torch.zeros(64, 256))
    optimizer = MuonClip([("layer.weight", matrix)], Rates())
    matrix.grad = weight(64, 256).detach()
    optimizer.step(1.0)
    assert 0.15 < float(matrix.detach().square().mean().sqrt()) < 0.25


@pytest.mark.parametrize("muon", [True, False])
def test_the_rest_is_torchs_adamw(muon: bool) -> None:
    ours = {"embed_tokens.weight": weight(7, 5), "norm.weight": weight(5)}
    plain = {name: nn.Parameter(value.detach().clone()) for name, value in ours.items()}
    rates = Rates(weight_decay=0.1)
    optimizer = MuonClip(ours.items(), rates, muon=muon)
    groups = [
        {"params": [value], "weight_decay": 0.1 if value.ndim > 1 else 0.0}
        for value in plain.values()
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=rates.betas, eps=rates.eps)
    for step in range(4):
        for name, value in ours.items():
            gradient = weight(*value.shape, seed=step).detach()
            value.grad, plain[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(0.01)
        reference.step()
    for name, value in ours.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)


def test_who_moves_what() -> None:
    assert is_muons("layers.0.self_attn.q_b_proj.weight", weight(2, 2))
    assert is_muons("layers.1.mlp.experts.up_proj.weight", weight(3, 2, 2))
    assert not is_muons("embed_tokens.weight", weight(2, 2))
    assert not is_muons("lm_head.weight", weight(2, 2))
    assert not is_muons("norm.weight", weight(2))


def test_weights_without_a_gradient_stay() -> None:
    idle = weight(3, 3)
    before = idle.detach().clone()
    MuonClip([("layer.weight", idle)], Rates()).step(0.1)
    assert torch.equal(idle.detach(), before)


# ---------------------------------------------------------------- QK-Clip


def attention() -> Attention:
    """Return an attention whose heads' queries differ in size."""
    made = Attention(ModelSpec.from_config(truth("plain").config.to_dict()))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        made.q_b_proj.weight.unflatten(0, (made.heads, -1)).mul_(
            torch.tensor([0.2, 1.0, 3.0, 9.0])[:, None, None]
        )
    return made


def products(made: Attention, x: torch.Tensor) -> torch.Tensor:
    """Return q k^T of every head without rotation, [heads, tokens, tokens]: content and rotary."""
    q = made.q_b_proj(made.q_a_layernorm(made.q_a_proj(x))).unflatten(-1, (made.heads, -1))
    latent, k_rope = made.kv_a_proj_with_mqa(x).split((32, made.rope), dim=-1)
    kv = made.kv_b_proj(made.kv_a_layernorm(latent)).unflatten(-1, (made.heads, -1))
    k = torch.cat((kv[..., : made.nope], k_rope[:, None].expand(-1, made.heads, -1)), dim=-1)
    return torch.einsum("qhd,khd->hqk", q, k)


def test_clipping_scales_each_heads_products_by_its_gamma() -> None:
    torch.manual_seed(0)
    made, x = attention(), torch.randn(9, 64)
    before = products(made, x).detach()
    shared_key = made.kv_a_proj_with_mqa.weight.detach().clone()
    made.max_logits = torch.tensor([1.0, 10.0, 20.0, 40.0])
    gamma = clip_qk(made, limit=10.0)
    assert gamma.tolist() == [1.0, 1.0, 0.5, 0.25]
    torch.testing.assert_close(
        products(made, x).detach(), before * gamma[:, None, None], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(made.kv_a_proj_with_mqa.weight.detach(), shared_key)


def test_the_bound_holds_after_clipping() -> None:
    torch.manual_seed(0)
    made = attention().train()
    x, positions = torch.randn(12, 64), torch.arange(12)
    angles = positions[:, None, None].float() / 7 ** torch.arange(made.rope // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    rows = Rows.of(packed([([0] * 12, [True] * 12)]), made.heads, rotation)
    made(x, rows)
    seen = made.max_logits.clone()
    limit = float(seen.median())
    assert float(seen.max()) > limit
    clip_qk(made, limit)
    made(x, rows)
    wanted = seen.clamp(max=limit)
    torch.testing.assert_close(made.max_logits, wanted, rtol=1e-4, atol=1e-4)


def test_values_are_not_clipped() -> None:
    made = attention()
    values = made.kv_b_proj.weight.unflatten(0, (made.heads, -1))[:, made.nope :].detach().clone()
    made.max_logits = torch.full((made.heads,), 1000.0)
    clip_qk(made, limit=1.0)
    after = made.kv_b_proj.weight.unflatten(0, (made.heads, -1))[:, made.nope :]
    assert torch.equal(after.detach(), values)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("tokens", [1, 128, 129, 300])
def test_attention_in_blocks_and_fused_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, tokens: int, kept: bool
) -> None:
    """Its gradients and its largest logits too."""
    if not kept:
        monkeypatch.setattr("mooncake.train.attention._LONG", 0)
    torch.manual_seed(0)
    given = [torch.randn(2, 3, tokens, 16, requires_grad=True) for _ in range(3)]
    q, k, v = given
    later = torch.ones(tokens, tokens).triu(1).bool()
    scores = (q @ k.mT * 0.25).masked_fill(later, float("-inf"))
    wanted, towards = scores.softmax(-1) @ v, torch.randn_like(v)
    made, largest = attend(q, k, v, 0.25)
    torch.testing.assert_close(largest, scores.amax(dim=(0, 2, 3)))
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(one, given, towards) for one in (made, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- norms


def test_norms_are_clipped_at_the_running_quantile() -> None:
    parameter, clip = weight(10), NormClip(quantile=0.5, window=4)
    norms = []
    for size in (1.0, 2.0, 3.0, 4.0, 100.0):
        parameter.grad = torch.full((10,), size / math.sqrt(10))
        norms.append(float(clip.clip([parameter])))
    assert norms == pytest.approx([1, 2, 3, 4, 100])
    assert float(parameter.grad.norm()) == pytest.approx(3.0)  # of 1, 2, 3, 4


def test_nothing_is_clipped_before_the_window_is_full() -> None:
    parameter, clip = weight(10), NormClip(window=4)
    for size in (1.0, 1.0, 50.0):
        parameter.grad = torch.full((10,), size)
        clip.clip([parameter])
        assert float(parameter.grad.max()) == size


def test_norms_are_restored() -> None:
    first, second = NormClip(window=2), NormClip(window=2)
    parameter = weight(3)
    for size in (1.0, 5.0):
        parameter.grad = torch.full((3,), size)
        first.clip([parameter])
    second.restore(first.state())
    assert float(second.limit()) == float(first.limit()) < math.inf
