"""Writes a quantized copy of a checkpoint in exactly the formats in which Kimi-K2 is published.

`mooncake model convert` runs this: FP8 blocks as in K2-Instruct (all linear layers), INT4 groups of
32 as in K2-Thinking (routed experts only). Owns nothing once it returns. Memory holds one shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mooncake.base import ConfigError
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME, state_digests
from mooncake.model.checkpoint.files.revision import STATED_NAME
from mooncake.model.checkpoint.files.whole_directory import copy_beside, whole_directory
from mooncake.model.checkpoint.quant import quantize_fp8_block, quantize_int4_packed
from mooncake.model.checkpoint.quant_format import (
    Fp8Block,
    QuantFormat,
    is_quantized,
    parse_quantization,
)
from mooncake.model.checkpoint.tensor_cuts import Shapes, mtp_shapes, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) of the source."""

SHARD_BYTES = 4 * 2**30

QUANTIZATION_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "int4": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                    "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                    "strategy": "group", "symmetric": True, "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*eh_proj",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}  # fmt: skip
"""The `quantization_config` of `config.json`, by the name that a user gives. It decides what is
quantized.
"""


def convert_checkpoint(
    source: Path,
    out: Path,
    format_name: str,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `source` quantized as `format_name` ("fp8" or "int4") to the directory `out`, with its
    MTP layers if it has any, and with `weights-digests.json`.

    Files beside the weights (tokenizer, templates) are copied. The directory appears whole or not
    at all.

    shard_bytes: how many bytes of the source's weights go into one file.

    Raises:
        ConfigError: the format is unknown, `source` is quantized already, or `out` holds something.
        CheckpointError: `source` cannot be read or lacks a tensor.
    """
    source, out = Path(source), Path(out)
    if format_name not in QUANTIZATION_CONFIGS:
        raise ConfigError(f"to: {format_name!r} is not one of {', '.join(QUANTIZATION_CONFIGS)}")
    checkpoint = Checkpoint.open(source)
    checkpoint.check_names(tensor_shapes(checkpoint.spec))
    if checkpoint.quantization is not None:
        raise ConfigError(f"{source}: is quantized already; convert the unquantized checkpoint")
    with whole_directory(out) as staging:
        _copy_beside(source, staging, QUANTIZATION_CONFIGS[format_name])
        _write(checkpoint, staging, QUANTIZATION_CONFIGS[format_name], progress, shard_bytes)
        state_digests(staging, staging)
    return out


def quantized(
    name: str, weight: torch.Tensor, quantization: QuantFormat
) -> dict[str, torch.Tensor]:
    """Return what is stored for tensor `name`: itself, or its quantized parts by their names."""
    if not is_quantized(quantization, name):
        return {name: weight}
    if isinstance(quantization, Fp8Block):
        values, scale_inv = quantize_fp8_block(weight, quantization.block)
        return {name: values, f"{name}_scale_inv": scale_inv}
    packed, scale, shape = quantize_int4_packed(weight, quantization.group_size)
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}


def _copy_beside(source: Path, staging: Path, quantization: Mapping[str, Any]) -> None:
    copy_beside(source, staging, skip=(INDEX_NAME, STATED_NAME))
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = dict(quantization)
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write(
    checkpoint: Checkpoint,
    staging: Path,
    config: Mapping[str, Any],
    progress: Progress | None,
    shard_bytes: int,
) -> None:
    quantization = parse_quantization(config)
    assert quantization is not None
    shapes = _held_shapes(checkpoint)
    shards = list(_shards(checkpoint, list(shapes), shard_bytes))
    whole = sum(checkpoint.stored_bytes(name) for name in shapes)
    weight_map: dict[str, str] = {}
    done = total = 0
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            parts = quantized(name, checkpoint.tensor(name, shapes[name]), quantization)
            tensors |= {part: tensor.contiguous() for part, tensor in parts.items()}
            done += checkpoint.stored_bytes(name)
            if progress is not None:
                progress(done, whole)
        save_file(tensors, staging / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (staging / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _held_shapes(checkpoint: Checkpoint) -> Shapes:
    """Return all tensors of the model, and those of the MTP layers that the checkpoint has."""
    spec = checkpoint.spec
    shapes = tensor_shapes(spec)
    for number in range(spec.num_nextn_predict_layers):
        found = mtp_shapes(spec, number, with_copies=True)
        shapes |= {name: shape for name, shape in found.items() if checkpoint.holds(name)}
    return shapes


def _shards(checkpoint: Checkpoint, names: list[str], limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name in names:
        size = checkpoint.stored_bytes(name)
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard
