"""The memory plan against built models and the published sizes of Kimi-K2."""

from __future__ import annotations

import pytest
import torch

from mooncake.base import KvLayout
from mooncake.model.memory import (
    count_parameters,
    weights_bytes,
    workspace_bytes,
)
from tests.support.model.specs import small_spec
from tests.support.model.tiny_models import CONFIGS, source_of, truth

KIMI_K2 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 163840,
    "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_equal_those_of_a_built_model(name: str) -> None:
    model = truth(name)
    source = source_of(model)
    count = count_parameters(source.spec)
    assert count.total == sum(tensor.numel() for tensor in source.tensors.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    biases = 8 * (source.spec.num_hidden_layers - 1)  # the router's are buffers in transformers
    assert count.total == parameters + biases
    assert weights_bytes(source.spec, "float32") == 4 * count.total


def test_kimi_k2_has_a_trillion_parameters() -> None:
    count = count_parameters(small_spec(**KIMI_K2))
    assert count.total == pytest.approx(1026.4e9, rel=1e-3)
    assert count.active == pytest.approx(32.9e9, rel=5e-3)


def test_routers_are_kept_in_float32() -> None:
    spec = small_spec()
    count = count_parameters(spec)
    assert count.router == 2 * (8 * 32 + 8)
    assert weights_bytes(spec, "bfloat16") == 2 * count.total + 2 * count.router


def test_one_kimi_k2_token_takes_70272_bytes() -> None:
    spec = small_spec(**KIMI_K2)
    layout = KvLayout.for_model(spec, block_tokens=64, dtype="bfloat16", weights_revision="x")
    assert layout.block_bytes == 64 * 70272


def test_workspace_grows_with_tokens_and_sequences() -> None:
    spec = small_spec()
    small = workspace_bytes(spec, "float32", step_tokens=16, step_sequences=1)
    longer = workspace_bytes(spec, "float32", step_tokens=32, step_sequences=1)
    wider = workspace_bytes(spec, "float32", step_tokens=16, step_sequences=9)
    assert small < longer
    assert wider - small == 8 * spec.vocab_size * 2 * torch.float32.itemsize
