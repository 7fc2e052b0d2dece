"""Model settings for tests: a complete `config.json` of the architecture, as small as it gets."""

from __future__ import annotations

from typing import Any

from mooncake.base import ModelSpec

SMALL_CONFIG: dict[str, Any] = {
    "model_type": "kimi_k2",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


KIMI_K2 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 163840,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""Sizes of Kimi-K2-Instruct, as changes to the small settings."""


def small_config(**changes: Any) -> dict[str, Any]:
    """Return a fresh copy of the settings with `changes`; a change to None takes the key out."""
    merged = {**SMALL_CONFIG, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def small_spec(**changes: Any) -> ModelSpec:
    """Return the spec read from `small_config`."""
    return ModelSpec.from_config(small_config(**changes))
