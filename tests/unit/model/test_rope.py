"""Rotary angles against transformers, and the order in which rotated numbers are kept."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mooncake.base import YarnScaling
from mooncake.model.layers.rows import Rope, rope_frequencies, rope_scale
from tests.support.model.specs import small_spec
from tests.support.model.tiny_models import CPU

# (factor, original, beta_fast, beta_slow, mscale, mscale_all_dim): K2-Instruct, K2-0905,
# DeepSeek-V3, terms that do not cancel, only one term, a range cut off at both ends.
SETTINGS = [
    (32.0, 4096, 1.0, 1.0, 1.0, 1.0),
    (64.0, 4096, 1.0, 1.0, 1.0, 1.0),
    (40.0, 4096, 32.0, 1.0, 1.0, 1.0),
    (4.0, 128, 32.0, 1.0, 0.7, 1.3),
    (4.0, 2048, 32.0, 1.0, 0.7, 0.0),
    (8.0, 16, 1000.0, 0.0001, 0.0, 0.0),
]


@pytest.mark.parametrize("theta", [10000.0, 50000.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_yarn_equals_transformers(setting, theta: float) -> None:
    factor, original, fast, slow, mscale, mscale_all = setting
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "mscale": mscale,
        "mscale_all_dim": mscale_all,
    }
    config = DeepseekV3Config(
        rope_parameters=parameters,
        qk_rope_head_dim=64,
        max_position_embeddings=int(original * factor),
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    yarn = YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=mscale,
        mscale_all_dim=mscale_all,
    )
    spec = small_spec(
        qk_rope_head_dim=64, rope_theta=theta, rope_scaling={**parameters, "type": "yarn"}
    )
    assert spec.yarn == yarn
    torch.testing.assert_close(rope_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert rope_scale(yarn) == pytest.approx(expected_scale, rel=1e-12)


def test_k2_frequencies_step_where_its_betas_say() -> None:
    """beta_fast = beta_slow = 1: pairs 0-19 as they are, the rest slowed by the whole factor."""
    scaling = {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    slowed = rope_frequencies(small_spec(qk_rope_head_dim=64, rope_scaling=scaling))
    plain = rope_frequencies(small_spec(qk_rope_head_dim=64))
    ratio = plain / slowed
    torch.testing.assert_close(ratio[:20], torch.ones(20))
    torch.testing.assert_close(ratio[20:], torch.full((12,), 32.0))
    spec = small_spec(
        qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling={**scaling, "factor": 64.0}
    )
    assert spec.softmax_scale == pytest.approx(0.1446796, rel=1e-6)


def test_interleaved_pairs_turn_in_place() -> None:
    spec = small_spec(qk_rope_head_dim=4)
    rope = Rope(spec, CPU)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rope(x, rope.rotation(torch.tensor([3])))[0, 0]
    second = 3 * spec.rope_theta**-0.5
    expected = [math.cos(3), math.sin(3), -2 * math.sin(second), 2 * math.cos(second)]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_halves_turn_in_place() -> None:
    spec = small_spec(qk_rope_head_dim=4, rope_interleave=False)
    rope = Rope(spec, CPU)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rope(x, rope.rotation(torch.tensor([3])))[0, 0]
    second = 3 * spec.rope_theta**-0.5
    expected = [math.cos(3), -2 * math.sin(second), math.sin(3), 2 * math.cos(second)]
    torch.testing.assert_close(turned, torch.tensor(expected))


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    spec = small_spec(qk_rope_head_dim=16, rope_interleave=interleaved)
    rope = Rope(spec, CPU)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 16, generator=generator) for _ in range(2))

    def score(at: int, to: int) -> torch.Tensor:
        turned_q = rope(q, rope.rotation(torch.tensor([at])))
        turned_k = rope(k, rope.rotation(torch.tensor([to])))
        return (turned_q * turned_k).sum(dim=-1)

    torch.testing.assert_close(score(7, 3), score(104, 100), atol=1e-4, rtol=0)
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-2)


def test_positions_zero_and_bfloat16_input() -> None:
    rope = Rope(small_spec(qk_rope_head_dim=8), CPU)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    turned = rope(x, rope.rotation(torch.tensor([0, 0])))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, x)
