"""Kimi-K2's published checkpoints without their numbers: every tensor of the right name, shape and
dtype, in files of the full size that hold nothing but headers (the rest is a hole).

Names and shapes are written down here as the model cards' files have them, not taken from the code
that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any

NUM_FILES = 62
LAYERS, EXPERTS = 61, 384
_ITEM = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_act": "silu",
    "hidden_size": 7168, "num_hidden_layers": LAYERS, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
    "rope_theta": 50000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "attention_bias": False, "bos_token_id": 163584, "eos_token_id": 163586,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    return {
        "type": "yarn", "factor": factor, "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip


FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "observer": "minmax", "dynamic": False, "actorder": None,
            },
        }
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip

INSTRUCT = CONFIG | {
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_scaling": _yarn(32.0, 1.0),
    "quantization_config": FP8,
}  # fmt: skip
THINKING = CONFIG | {
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_scaling": _yarn(64.0, 1.0),
    "quantization_config": INT4,
}  # fmt: skip
K2_5 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": THINKING | {"rope_scaling": _yarn(64.0, 32.0)},
}  # fmt: skip


def write_headers(out: Path, config: dict[str, Any]) -> None:
    """Write one of the three checkpoints into the new folder `out`."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    nested = "text_config" in config
    text = config["text_config"] if nested else config
    quantized = _fp8 if text["quantization_config"] is FP8 else _int4
    tensors = list(_language_model(quantized, "language_model." if nested else ""))
    if nested:
        tensors.append(("vision_tower.patch_embed.proj.weight", "BF16", (1152, 3, 14, 14)))
        tensors.append(("mm_projector.linear_1.weight", "BF16", (4608, 4608)))
    each = ceil(len(tensors) / NUM_FILES)
    weight_map = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05d}-of-{NUM_FILES:06d}.safetensors"
        share = tensors[number * each : (number + 1) * each]
        _write_file(out / file, share)
        weight_map |= dict.fromkeys((name for name, _, _ in share), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def _language_model(quantized: Any, prefix: str) -> Iterator[Tensor]:
    plain = "BF16"
    yield f"{prefix}model.embed_tokens.weight", plain, (163840, 7168)
    for layer in range(LAYERS):
        at = f"{prefix}model.layers.{layer}."
        yield at + "input_layernorm.weight", plain, (7168,)
        yield at + "post_attention_layernorm.weight", plain, (7168,)
        attention = at + "self_attn."
        yield attention + "q_a_layernorm.weight", plain, (1536,)
        yield attention + "kv_a_layernorm.weight", plain, (512,)
        for name, shape in (
            ("q_a_proj", (1536, 7168)), ("q_b_proj", (12288, 1536)),
            ("kv_a_proj_with_mqa", (576, 7168)), ("kv_b_proj", (16384, 512)),
            ("o_proj", (7168, 8192)),
        ):  # fmt: skip
            yield from quantized(f"{attention}{name}.weight", shape)
        if layer == 0:
            yield from _mlp(quantized, at + "mlp.", 18432)
            continue
        yield at + "mlp.gate.weight", plain, (EXPERTS, 7168)
        yield at + "mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        yield from _mlp(quantized, at + "mlp.shared_experts.", 2048)
        for expert in range(EXPERTS):
            yield from _mlp(quantized, f"{at}mlp.experts.{expert}.", 2048)
    yield f"{prefix}model.norm.weight", plain, (7168,)
    yield f"{prefix}lm_head.weight", plain, (163840, 7168)


def _mlp(quantized: Any, prefix: str, inner: int) -> Iterator[Tensor]:
    yield from quantized(prefix + "gate_proj.weight", (inner, 7168))
    yield from quantized(prefix + "up_proj.weight", (inner, 7168))
    yield from quantized(prefix + "down_proj.weight", (7168, inner))


def _fp8(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield name, "F8_E4M3", shape
    yield name + "_scale_inv", "F32", (ceil(shape[0] / 128), ceil(shape[1] / 128))


def _int4(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Only routed experts are packed: all else is on the list of what is left as it was."""
    if ".mlp.experts." not in name:
        yield name, "BF16", shape
        return
    yield name + "_packed", "I32", (shape[0], shape[1] // 8)
    yield name + "_scale", "BF16", (shape[0], shape[1] // 32)
    yield name + "_shape", "I64", (2,)


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    """Write the header, and of the bytes only the recorded shapes: the loader compares them."""
    header, shapes, at = {}, {}, 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -_ITEM[tensor[1]]):
        num_bytes = _ITEM[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + num_bytes)}
        if dtype == "I64":
            down = name.endswith("down_proj.weight_shape")
            shapes[at] = (7168, 2048) if down else (2048, 7168)
        at += num_bytes
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with path.open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        file.truncate(8 + len(packed) + at)
        for place, (rows, columns) in shapes.items():
            file.seek(8 + len(packed) + place)
            file.write(rows.to_bytes(8, "little") + columns.to_bytes(8, "little"))
