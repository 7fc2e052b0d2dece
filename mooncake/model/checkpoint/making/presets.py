"""Small K2-architecture checkpoints with seeded random weights, in Hugging Face's layout.

`mooncake model init` runs this, for tests, demonstrations and benchmarks without a real checkpoint.
Owns nothing once it returns; `tokenizer_files` makes the tokenizer's files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

import mooncake
from mooncake.base import CheckpointError, ConfigError, ModelSpec
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME
from mooncake.model.checkpoint.files.whole_directory import whole_directory
from mooncake.model.checkpoint.tensor_cuts import Shapes, mtp_shapes, tensor_shapes
from mooncake.model.checkpoint.tokenizer_files import (
    CHARACTERS_PATTERN,
    NUM_SPECIAL,
    VOCABULARY_NAME,
    special_token_id,
    write_tokenizer_files,
)
from mooncake.model.checkpoint.weights import SPEC_DTYPES

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""

_Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named shape. `config` holds the differences from `_COMMON`."""

    summary: str
    num_base_tokens: int
    shard_bytes: int
    config: Mapping[str, Any]
    vocabulary: Path | None = None
    """A `tiktoken.model` to use; None: one is learned from the built-in text."""
    pattern: str = ""
    """The expression that splits its text; empty: Kimi-K2's."""
    temperature: float | None = None
    """The temperature for requests that name none."""


PRESETS: dict[str, Preset] = {
    "k2-nano": Preset(
        summary="0.3 M parameters, a test's checkpoint: written in about a second",
        num_base_tokens=512,
        shard_bytes=256 * 2**10,
        config={
            "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "k2-tiny": Preset(
        summary="46 M parameters, for clusters on one small machine",
        num_base_tokens=4096,
        shard_bytes=32 * 2**20,
        config={
            "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
            "q_lora_rank": 192, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
            "v_head_dim": 64, "intermediate_size": 1408, "moe_intermediate_size": 256,
            "n_routed_experts": 16, "num_experts_per_tok": 4,
        },
    ),
    "k2-small": Preset(
        summary="722 M parameters, 237 M active a token: what the CPU benchmarks run",
        num_base_tokens=32512,
        shard_bytes=384 * 2**20,
        config={
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
            "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 2304,
            "moe_intermediate_size": 512, "n_routed_experts": 32, "num_experts_per_tok": 4,
        },
    ),
    "k2-demo": Preset(
        summary="8 M parameters, the demonstration model: the shape that `mooncake train` trains",
        num_base_tokens=1280,
        shard_bytes=16 * 2**20,
        config={
            "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4,
            "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
            "v_head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 96,
            "n_routed_experts": 16, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
            "rope_scaling": None, "rope_theta": 10000.0, "max_position_embeddings": 8192,
        },
        # The tokenizer of the trained checkpoint: whole words of its tasks, and single characters.
        vocabulary=Path(mooncake.__file__).parent / "k2-demo" / VOCABULARY_NAME,
        pattern=CHARACTERS_PATTERN,
        temperature=0.0,
    ),
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    # Kimi-K2's own model_type needs code from its repository; this one is the same architecture
    # and is known to stock transformers.
    "model_type": "deepseek_v3",
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "use_cache": True, "max_position_embeddings": 32768, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def preset_config(
    preset: str, dtype: str = "bfloat16", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the `config.json` of `preset`, with `overrides` of its keys.

    Raises:
        ConfigError: there is no such preset or dtype, or the overrides make an impossible shape.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset: {preset!r} is not one of {', '.join(PRESETS)}")
    if dtype not in SPEC_DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(SPEC_DTYPES)}")
    chosen = PRESETS[preset]
    num_base = chosen.num_base_tokens
    config = {
        **_COMMON,
        **chosen.config,
        "num_key_value_heads": chosen.config["num_attention_heads"],
        "vocab_size": num_base + NUM_SPECIAL,
        "torch_dtype": dtype,
        "bos_token_id": special_token_id("[BOS]", num_base),
        "eos_token_id": special_token_id("<|im_end|>", num_base),
        "pad_token_id": special_token_id("[PAD]", num_base),
        **(overrides or {}),
    }
    try:
        ModelSpec.from_config(config)
    except CheckpointError as error:
        raise ConfigError(f"preset {preset} with {dict(overrides or {})}: {error}") from error
    return config


def init_checkpoint(
    preset: str,
    seed: int,
    out: Path,
    dtype: str = "bfloat16",
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of `preset` to the directory `out` and return it.

    The same arguments give the same bytes. The directory appears whole or not at all: it is written
    beside its place and renamed. `overrides` replaces keys of `config.json`, for other shapes.

    Raises:
        ConfigError: the preset or dtype is unknown, or `out` holds something already.
    """
    out = Path(out)
    config = preset_config(preset, dtype, overrides)
    with whole_directory(out) as staging:
        _write_all(staging, config, PRESETS[preset], seed, progress)
    return out


def write_preset_files(preset: str, directory: Path) -> dict[str, Any]:
    """Write all files of a checkpoint of `preset` except its weights into `directory`, which is
    created if necessary. Return its `config.json`.

    Raises:
        ConfigError: there is no such preset.
    """
    config = preset_config(preset)
    directory.mkdir(parents=True, exist_ok=True)
    _write_files(directory, config, PRESETS[preset])
    return config


def _write_all(
    directory: Path,
    config: Mapping[str, Any],
    preset: Preset,
    seed: int,
    progress: Progress | None,
) -> None:
    _write_files(directory, config, preset)
    _write_weights(directory, ModelSpec.from_config(config), preset, seed, progress)


def _write_files(directory: Path, config: Mapping[str, Any], preset: Preset) -> None:
    _write_json(directory / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if preset.temperature is not None:
        generation["temperature"] = preset.temperature
    _write_json(directory / "generation_config.json", generation)
    write_tokenizer_files(directory, preset.num_base_tokens, preset.vocabulary, preset.pattern)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    directory: Path, spec: ModelSpec, preset: Preset, seed: int, progress: Progress | None
) -> None:
    shapes = tensor_shapes(spec)
    for layer in range(spec.num_nextn_predict_layers):
        shapes |= mtp_shapes(spec, layer, with_copies=True)
    dtype = SPEC_DTYPES[spec.dtype]
    maker = _WeightMaker(spec, preset.num_base_tokens, seed)
    shards = list(_shards(shapes, dtype, preset.shard_bytes))
    total = sum(_num_bytes(name, shape, dtype) for name, shape in shapes.items())
    weight_map: dict[str, str] = {}
    done = 0
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for number, names in enumerate(shards, start=1):
            file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            made = pool.map(lambda name: maker.tensor(name, shapes[name], dtype), names)
            tensors = dict(zip(names, made, strict=True))
            save_file(tensors, directory / file_name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file_name)
            done += sum(tensor.nbytes for tensor in tensors.values())
            if progress is not None:
                progress(done, total)
    _write_json(
        directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _shards(shapes: Shapes, dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = _num_bytes(name, shape, dtype)
        if names and filled + size > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _num_bytes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * _dtype_of(name, dtype).itemsize


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    # The router's bias shifts close scores. K2 keeps it in fp32, whatever the weights are.
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


_COPIED = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""The tensors of the model that an MTP layer repeats."""


class _WeightMaker:
    """Random weights with which greedy decoding is steady, yet depends on the whole context.

    With plain random weights, the two best of V logits have a mean distance of only sigma/sqrt(2 ln
    V), so rounding decides many tokens. Here each vocabulary entry also *pulls* at the next one of
    a random cycle through the vocabulary. The context decides about every fifth token, the others
    win clearly, and generation does not fall into a loop. Experts and late layers are small beside
    the residual stream, so that bf16 noise does not grow from layer to layer. MTP layers pass the
    embedding on, so that they draft the entry that it pulls at. A tensor depends only on the seed,
    its name and its shape.
    """

    LOGIT_STD = 4.0
    QUERY_GAIN = 1.5  # peaked attention: single tokens matter, not only averages
    OUTPUT_GAIN = 3.7
    SHARED_GAIN = 0.75
    EXPERT_GAIN = 0.3
    JOIN_GAIN = 0.1
    PULL = 2.8
    BIAS_STD = 0.02
    NORM_STD = 0.1
    SPECIAL_SCALE = 0.02  # a random model should not end its own turn

    def __init__(self, spec: ModelSpec, num_base_tokens: int, seed: int) -> None:
        self._spec = spec
        self._num_base = num_base_tokens
        self._seed = seed

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return tensor `name` as stored in a checkpoint of `dtype`."""
        in_layer = name.split(".", 3)[-1]
        made = self._make(_COPIED.get(in_layer, name), shape)
        return torch.from_numpy(made).to(_dtype_of(name, dtype))

    def _make(self, name: str, shape: tuple[int, ...]) -> _Weights:
        values = self._random(name).standard_normal(shape, dtype=np.float32)
        if name.endswith("embed_tokens.weight"):
            return values
        if name.endswith("norm.weight"):
            return 1 + values * np.float32(self.NORM_STD)
        if name.endswith(("e_score_correction_bias", ".bias")):
            return values * np.float32(self.BIAS_STD)
        values *= np.float32(self._gain(name) / math.sqrt(shape[-1]))
        if name == "lm_head.weight":
            self._shape_head(values)
        if name.endswith("eh_proj.weight"):
            values[:, : shape[0]] += np.eye(shape[0], dtype=np.float32)
        return values

    def _gain(self, name: str) -> float:
        depth = math.sqrt(self._spec.num_hidden_layers)
        if name == "lm_head.weight":
            return self.LOGIT_STD
        if "q_b_proj" in name or "q_proj" in name:
            return self.QUERY_GAIN
        if "o_proj" in name:
            return self.OUTPUT_GAIN / depth
        if "eh_proj" in name:
            return self.JOIN_GAIN
        if "down_proj" in name:
            return (self.EXPERT_GAIN if ".experts." in name else self.SHARED_GAIN) / depth
        return 1.0

    def _shape_head(self, head: _Weights) -> None:
        vocab, hidden = head.shape
        head[self._num_base :] *= np.float32(self.SPECIAL_SCALE)
        cycle = self._random("cycle").permutation(self._num_base)
        embeddings = self._make("model.embed_tokens.weight", (vocab, hidden))
        # logit of the successor = pull * the expected largest of `vocab` random logits
        pull = self.PULL * math.sqrt(2 * math.log(vocab)) * self.LOGIT_STD / hidden
        head[np.roll(cycle, -1)] += np.float32(pull) * embeddings[cycle]

    def _random(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
