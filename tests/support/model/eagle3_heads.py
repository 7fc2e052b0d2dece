"""EAGLE-3 heads for tests: random ones, and one that knows what follows a token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from mooncake.base import ModelSpec
from mooncake.model.checkpoint.eagle3 import (
    EMBEDDING,
    HEAD,
    IS_DRAFTED,
    TO_TARGET,
    Eagle3Spec,
    eagle3_shapes,
)
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.loading import load_model
from tests.support.model.tiny_models import CPU, kv_for, slot

Tensors = dict[str, torch.Tensor]


def config_of(model: ModelSpec, **changes: Any) -> dict[str, Any]:
    """Return the `config.json` of a head as published ones have it, smaller."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "vocab_size": model.vocab_size,
        "draft_vocab_size": model.vocab_size - model.vocab_size // 4,
        **changes,
    }


def mla_config_of(model: ModelSpec, **changes: Any) -> dict[str, Any]:
    """Return the `config.json` of a head with MLA, as published ones have it, smaller."""
    return (
        config_of(
            model,
            architectures=["Eagle3DeepseekV2ForCausalLM"],
            model_type="deepseek_v3",
            head_dim=None,
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
        )
        | changes
    )


def random_tensors(config: dict[str, Any], model: ModelSpec, seed: int = 0) -> Tensors:
    """Return a random head of all tensors that one may have; it drafts three tokens of four."""
    spec = Eagle3Spec.from_config(config, model)
    generator = torch.Generator().manual_seed(seed)
    shapes = eagle3_shapes(spec)
    shapes[HEAD] = (spec.draft_vocab_size, spec.hidden_size)
    shapes[EMBEDDING] = (spec.vocab_size, spec.hidden_size)
    tensors = {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 2 / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    return tensors | tables(spec)


def tables(spec: Eagle3Spec) -> Tensors:
    """Return which tokens are drafted: the last of every four is not."""
    drafted = torch.ones(spec.vocab_size, dtype=torch.bool)
    left_out = spec.vocab_size - spec.draft_vocab_size
    drafted[3 : 4 * left_out : 4] = False
    targets = drafted.nonzero().flatten()
    return {TO_TARGET: targets - torch.arange(len(targets)), IS_DRAFTED: drafted}


def write_head(out: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a head's directory."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: each.clone() for name, each in tensors.items()}, out / "model.safetensors")
    return out


def knowing_head(model: Path, out: Path, texts: Sequence[Sequence[int]]) -> Path:
    """Write a head for the checkpoint `model` that knows by heart what follows in `texts`, as far
    as a linear function of a token and the states before it can: attention finds the row's own
    token, and the rest of the layer does next to nothing.
    """
    checkpoint = Checkpoint.open(model)
    spec = checkpoint.spec
    hidden = spec.hidden_size
    config = config_of(spec, head_dim=hidden, num_attention_heads=1, num_key_value_heads=1)
    tensors = {name: 0.01 * each for name, each in random_tensors(config, spec).items()}
    tensors |= tables(Eagle3Spec.from_config(config, spec))
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm",
                 "midlayer.post_attention_layernorm"):  # fmt: skip
        tensors[name + ".weight"] = torch.ones(hidden)
    of_token = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    attention = "midlayer.self_attn."
    tensors[attention + "q_proj.weight"] = 4 * of_token
    tensors[attention + "k_proj.weight"] = tensors[attention + "v_proj.weight"] = of_token
    head = checkpoint.tensor(HEAD, (spec.vocab_size, hidden)).float()
    tensors[HEAD] = head[tensors[IS_DRAFTED]]
    embedding = checkpoint.tensor("model.embed_tokens.weight", head.shape).float()
    embedding = functional.rms_norm(embedding, (hidden,))
    given, wanted = [], []
    kimi = load_model(checkpoint, dtype=torch.float32, device=CPU)
    for text in texts:
        read = states_of(kimi, text, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        given.append(torch.cat((read[:-2], embedding[torch.tensor(text[1:-1])]), dim=-1))
        wanted.append(functional.normalize(head[torch.tensor(text[2:])], dim=-1))
    found = torch.linalg.lstsq(torch.cat(given), torch.cat(wanted)).solution.T
    tensors["fc.weight"], tensors[attention + "o_proj.weight"] = found.split(
        [3 * hidden, hidden], 1
    )
    del tensors[EMBEDDING]
    return write_head(out, config, tensors)


@torch.inference_mode()
def states_of(model: KimiK2, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Return what goes into some layers, of all tokens of a text, side by side."""
    num_pages = -(-len(tokens) // 16)
    kv, read = kv_for(model.spec, num_pages), ReadStates(tuple(layers))
    every = slot(1, 0, tokens, range(num_pages))
    inputs = build_inputs([every], frozenset([1]), kv.page_shape, lambda *_: True)
    model.forward(inputs, kv, read=read)
    return read.rows
