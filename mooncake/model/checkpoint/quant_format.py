"""The two formats that a checkpoint's `quantization_config` may name. Needs no torch, so that a
memory plan can count weights as they are stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake.base import CheckpointError

FP8_BLOCK = 128
INT4_GROUP = 32
_PATTERN = "re:"


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """`quant_method: fp8` with `weight_block_size`: `weight` e4m3 and `weight_scale_inv`."""

    block: tuple[int, int]
    skipped: tuple[str, ...]
    """The names of modules that are not quantized (`modules_to_not_convert`)."""

    def quantizes(self, module: str) -> bool:
        """Whether the weight of `module` is stored quantized."""
        return not any(part in module for part in self.skipped)


@dataclass(frozen=True, slots=True)
class Int4Group:
    """compressed-tensors `pack-quantized`: `weight_packed`, `weight_scale`, `weight_shape`."""

    group_size: int
    ignored: tuple[str, ...]
    """Module names, or `re:` and a pattern that is matched from the start of the name."""

    def quantizes(self, module: str) -> bool:
        """Whether the weight of the linear layer `module` is stored quantized."""
        for rule in self.ignored:
            if rule.startswith(_PATTERN):
                if re.match(rule.removeprefix(_PATTERN), module):
                    return False
            elif rule == module:
                return False
        return True


QuantFormat = Fp8Block | Int4Group

_LINEAR = "_proj.weight", "_proj_with_mqa.weight"
"""The endings of linear layers' names. The router (`mlp.gate`) and embeddings are not quantized."""
_WIDE = "eh_proj.weight"
"""The part of an MTP layer that DeepSeek-V3 does not quantize: the product of its two inputs."""


def is_quantized(quantization: QuantFormat | None, name: str) -> bool:
    """Whether a checkpoint of this format stores tensor `name` quantized."""
    if quantization is None or not name.endswith(_LINEAR) or name.endswith(_WIDE):
        return False
    return quantization.quantizes(name.removesuffix(".weight"))


def parse_quantization(config: Mapping[str, Any] | None) -> QuantFormat | None:
    """Read a checkpoint's `quantization_config` (None: not quantized).

    Raises:
        CheckpointError: this engine cannot read the format, or an option of it, exactly; the
            message names it.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: quantization_config={config!r:.80} is not an object")
    method = config.get("quant_method")
    if method == "fp8":
        return _parse_fp8(config)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _parse_compressed(config)
    raise _unsupported("quant_method", method, "'fp8' and 'compressed-tensors'")


def _unsupported(key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config.{key}={value!r:.200} is not supported; this engine "
        f"reads {wanted}"
    )


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the names under the first of `keys` that has any."""
    key = next((key for key in keys if config.get(key)), keys[0])
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unsupported(key, names, "a list of names")
    return tuple(names)


def _rules(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names and patterns under `key`."""
    rules = _names(config, key)
    for rule in rules:
        try:
            re.compile(rule.removeprefix(_PATTERN) if rule.startswith(_PATTERN) else "")
        except re.error as error:
            raise _unsupported(key, rule, f"regular expressions after {_PATTERN}") from error
    return rules


def _parse_fp8(config: Mapping[str, Any]) -> Fp8Block:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported("fmt", config["fmt"], "'e4m3'")
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(_positive(n) for n in block):
        raise _unsupported("weight_block_size", block, "two positive numbers, [128, 128] in K2")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise _unsupported("activation_scheme", config["activation_scheme"], "'dynamic'")
    return Fp8Block(
        (block[0], block[1]), _names(config, "modules_to_not_convert", "ignored_layers")
    )


def _parse_compressed(config: Mapping[str, Any]) -> Int4Group:
    if config.get("format") != "pack-quantized":
        raise _unsupported("format", config.get("format"), "'pack-quantized'")
    # A transform rotates weights; a sparse format leaves numbers out of them.
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = config.get(key)
        is_dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not is_dense:
            raise _unsupported(key, value, "none")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _unsupported("config_groups", groups, "exactly one group")
    ((name, group),) = groups.items()
    where = f"config_groups.{name}"
    if not isinstance(group, dict):
        raise _unsupported(where, group, "one group with its settings")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise _unsupported(f"{where}.{key}", group[key], "null")
    if group.get("format") not in (None, "pack-quantized"):
        raise _unsupported(f"{where}.format", group["format"], "'pack-quantized'")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _unsupported(f"{where}.weights", weights, "an object")
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise _unsupported(f"{where}.weights.{key}", weights.get(key), repr(value))
    if weights.get("actorder") not in (None, False):
        raise _unsupported(f"{where}.weights.actorder", weights["actorder"], "null")
    size = weights.get("group_size")
    if not isinstance(size, int) or not _positive(size):
        raise _unsupported(f"{where}.weights.group_size", size, "a positive number, 32 in K2")
    return Int4Group(size, _rules(config, "ignore"))


def _positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def fp8_scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of `weight_scale_inv` for a weight of `shape`. A partial last block counts
    as one.
    """
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])
