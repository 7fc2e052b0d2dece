"""A `config.json` becomes a spec, in every form that checkpoints use; what cannot is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mooncake.base import CheckpointError, ModelSpec, yarn_mscale
from tests.support.model.specs import small_config, small_spec

YARN = {
    "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
    "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def test_sizes_are_taken_over() -> None:
    spec = small_spec()
    assert (spec.num_hidden_layers, spec.num_attention_heads, spec.hidden_size) == (3, 2, 32)
    assert spec.qk_head_dim == 12
    assert spec.kv_width == 20
    assert spec.eos_token_ids == [2]
    assert spec.dtype == "bfloat16"
    assert spec.softmax_scale == pytest.approx(12**-0.5)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"q_lora_rank": None}, "q_lora_rank", None),
        ({"eos_token_id": [5, 6]}, "eos_token_ids", [5, 6]),
        ({"eos_token_id": None}, "eos_token_ids", []),
        ({"torch_dtype": None, "dtype": "float32"}, "dtype", "float32"),
        ({"torch_dtype": None}, "dtype", "bfloat16"),
        ({"model_type": "deepseek_v3"}, "model_type", "deepseek_v3"),
        ({"num_nextn_predict_layers": 1}, "num_hidden_layers", 3),
        ({"rope_interleave": False}, "rope_interleave", False),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization", {"quant_method": "fp8"}),
    ],
)
def test_variants(changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(small_spec(**changes), field) == value


@pytest.mark.parametrize(
    ("key", "value"), [("n_group", 1), ("topk_group", 1), ("n_shared_experts", 0)]
)
def test_null_stands_for_none_of_it(key: str, value: int) -> None:
    assert getattr(ModelSpec.from_config(small_config() | {key: None}), key) == value


def test_both_forms_of_the_rope_settings_mean_the_same() -> None:
    older = small_spec(rope_scaling=YARN)
    parameters = {**YARN, "rope_type": "yarn", "rope_theta": 50000.0}
    newer = small_spec(rope_theta=None, rope_parameters=parameters)
    assert older == newer
    assert older.yarn is not None
    assert older.yarn.original_max_position == 4096
    assert older.rope_theta == 50000.0


def test_the_older_form_of_the_rope_settings_wins() -> None:
    """As in transformers, not a key of the newer one is read then."""
    newer = {**YARN, "rope_type": "yarn", "rope_theta": 7.0, "mscale": 3.0}
    older = {key: value for key, value in YARN.items() if key != "mscale"}
    both = small_spec(rope_scaling=older, rope_parameters=newer)
    assert both == small_spec(rope_scaling=older)
    assert both.yarn is not None
    assert both.yarn.mscale == 0


@pytest.mark.parametrize(
    ("beside", "inside", "read"), [(64, 4096, 64), (64, 0, 64), (None, 0, 256)]
)
def test_the_original_length_is_found(beside: int | None, inside: int, read: int) -> None:
    key = "original_max_position_embeddings"
    spec = small_spec(rope_scaling={**YARN, key: inside}, **{key: beside})
    assert spec.yarn is not None
    assert spec.yarn.original_max_position == read


def test_yarn_widens_the_softmax_scale() -> None:
    spec = small_spec(rope_scaling=YARN)
    temperature = 0.1 * math.log(32.0) + 1.0
    assert spec.softmax_scale == pytest.approx(12**-0.5 * temperature**2)
    assert yarn_mscale(1.0, 1.0) == 1.0
    assert small_spec(rope_scaling={**YARN, "mscale_all_dim": 0}).softmax_scale == pytest.approx(
        12**-0.5
    )


def test_the_language_part_of_a_wrapped_config_is_found() -> None:
    spec = ModelSpec.from_config({"model_type": "kimi_vl", "text_config": small_config()})
    assert spec == small_spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported.*kimi_k2, deepseek_v3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"kv_lora_rank": None, "vocab_size": None}, "missing kv_lora_rank, vocab_size"),
        ({"rope_theta": None}, "rope_theta .* is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"is_causal": False}, "is_causal=False is not supported, only True"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has others"),
        ({"layer_types": 5}, "layer_types has others"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "lack 'factor'"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, r"attention_factor=1\.2.*only None"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate=False.*only True"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"n_group": None}, "missing n_group"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok <= n_routed_experts"),
        ({"n_group": 3}, "n_group divides n_routed_experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group <= n_group"),
        ({"n_group": 8, "topk_group": 1}, "num_experts_per_tok <= experts in topk_group groups"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is even"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"qk_nope_head_dim": -8}, "qk_nope_head_dim"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rope_scaling": 7}, "rope_scaling must be an object, not 7"),
        ({"rope_scaling": {**YARN, "mscale": [1]}}, "mscale"),
        ({"rope_scaling": {**YARN, "factor": math.nan}}, "factor"),
        ({"model_type": "kimi_vl", "text_config": [1]}, "text_config must be an object"),
        ({"topk_group": "\ud800"}, "surrogates not allowed"),
        ({"hidden_act": "g" * 10_000}, "^config.json: hidden_act='g{20,100} is not supported"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        small_spec(**changes)
