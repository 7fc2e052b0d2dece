"""Every tensor is cut so that the ranks' parts are the whole, and only where it may be cut."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mooncake.base import ConfigError, Shape
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS
from mooncake.model.checkpoint.quant_format import parse_quantization
from mooncake.model.checkpoint.tensor_cuts import (
    check_cuts,
    check_slabs,
    cut_of,
    part_shape,
    tensor_shapes,
)
from tests.support.model.specs import KIMI_K2, small_spec

WIDE = {
    "num_attention_heads": 8, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "v_head_dim": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_parts_of_all_ranks_are_the_whole(changes: dict[str, Any], num_ranks: int) -> None:
    spec = small_spec(**WIDE, **changes)
    check_cuts(spec, None, Shape(tp=num_ranks))
    cuts = set()
    for name, shape in tensor_shapes(spec).items():
        cut = cut_of(spec, name, num_ranks)
        if cut is None:
            continue
        cuts.add(name.split(".")[-2])
        parts = [cut.part(shape, rank, num_ranks) for rank in range(num_ranks)]
        held = [row for part in parts for row in range(part.first, part.stop)]
        assert held == list(range(shape[cut.dim]))
        assert math.prod(part_shape(shape, cut, num_ranks)) * num_ranks == math.prod(shape)
        assert shape[cut.dim] // num_ranks % cut.unit == 0
    wanted = {"kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"}
    wanted |= {"q_proj"} if spec.q_lora_rank is None else {"q_b_proj"}
    assert cuts == (wanted - {"embed_tokens", "lm_head"} if spec.tie_word_embeddings else wanted)


def test_one_rank_holds_everything() -> None:
    spec = small_spec()
    assert all(cut_of(spec, name, 1) is None for name in tensor_shapes(spec))


def test_a_vocabulary_that_does_not_divide_is_whole() -> None:
    spec = small_spec(vocab_size=301)
    assert cut_of(spec, "lm_head.weight", 2) is None
    assert cut_of(spec, "model.embed_tokens.weight", 2) is not None


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({}, 3, "2 attention heads do not divide among 3 ranks; .* among 1, 2 ranks"),
        ({"num_attention_heads": 4, "intermediate_size": 50}, 4, "50 columns of a dense layer"),
        ({"num_attention_heads": 4, "moe_intermediate_size": 18}, 4, "18 columns of an expert"),
    ],
)
def test_what_does_not_divide_is_named(
    changes: dict[str, Any], num_ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cuts(small_spec(**changes), None, Shape(tp=num_ranks))


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"intermediate_size": 50}, "tp4", "=4: .* 50 columns of .*mlp.down_proj.* among 1, 2 r"),
        ({"moe_intermediate_size": 31}, "tp2", "31 columns of .*experts.* shared among 1 ranks"),
        ({}, "tp2-dcp2", "decode-context-parallel-size=2: deterministic needs 1"),
    ],
)
def test_sums_of_fixed_order_that_cannot_be_shared_are_named(
    changes: dict[str, Any], shape: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_slabs(small_spec(**changes), Shape.parse(shape))


def test_sixteen_ranks_sum_kimi_k2_in_the_order_of_one() -> None:
    for tp in (1, 2, 4, 8, 16):
        check_slabs(small_spec(**KIMI_K2), Shape(tp=tp))
    with pytest.raises(ConfigError, match="in 16 slabs"):
        check_slabs(small_spec(**KIMI_K2), Shape(tp=32))


@pytest.mark.parametrize(("kind", "most"), [("fp8", 16), ("int4", 64)])
def test_kimi_k2_is_cut_as_far_as_its_quantized_blocks_stay_whole(kind: str, most: int) -> None:
    spec = small_spec(**KIMI_K2)
    quantization = parse_quantization(QUANTIZATION_CONFIGS[kind])
    for num_ranks in (1, 2, 4, 8, 16, 32, 64):
        if num_ranks <= most:
            check_cuts(spec, quantization, Shape(tp=num_ranks))
        else:
            with pytest.raises(ConfigError, match="quantized blocks are 128 wide"):
                check_cuts(spec, quantization, Shape(tp=num_ranks))


def test_experts_are_whole_where_ranks_share_them_out() -> None:
    spec = small_spec(**KIMI_K2)
    check_cuts(spec, parse_quantization(QUANTIZATION_CONFIGS["fp8"]), Shape.parse("tp8-dp2-ep16"))
    for name in tensor_shapes(spec):
        whole = cut_of(spec, name, 8, whole_experts=True)
        assert whole == (None if ".mlp.experts." in name else cut_of(spec, name, 8))
    wrong = r"384 experts do not divide among 40 ranks \(tp8-dp5-ep40\); 8, 16, 24, .* would do"
    with pytest.raises(ConfigError, match=wrong):
        check_cuts(spec, None, Shape(tp=8, dp=5, ep=40))
