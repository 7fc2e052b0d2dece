"""The specification of a model, read from a checkpoint's `config.json`. No size of Kimi-K2 is
written anywhere else in the code.

Supports `model_type` kimi_k2 and deepseek_v3 (the same architecture: MLA attention, routed
experts), with rope settings in the older form (`rope_theta`, `rope_scaling`) and in that of
transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from mooncake.base.errors import CheckpointError

SUPPORTED_MODEL_TYPES = ("kimi_k2", "deepseek_v3")

MAX_SIZE = 2**31 - 1
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Factor = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Bounds on the values in `config.json`: within them no product and no root overflows."""


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True):
    """YaRN context extension (arXiv 2309.00071), DeepSeek-V3's variant."""

    factor: Factor
    original_max_position: Size
    beta_fast: Factor
    beta_slow: Factor
    mscale: Factor
    mscale_all_dim: Factor


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and settings of one model; field names follow `config.json` where it has them."""

    model_type: str
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    intermediate_size: Size
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Count
    num_experts_per_tok: Size
    first_k_dense_replace: Count
    n_group: Size
    topk_group: Size
    norm_topk_prob: bool
    routed_scaling_factor: Factor
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: Factor
    rope_theta: Factor
    rope_interleave: bool
    yarn: YarnScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    num_nextn_predict_layers: Count
    """The number of MTP layers after the last layer. They only make drafts
    (`--speculative-config`).
    """
    dtype: str
    """The dtype of the checkpoint's tensors: "bfloat16", "float16" or "float32"."""
    bos_token_id: Count | None
    eos_token_ids: list[Count]
    quantization: dict[str, Any] | None
    """The checkpoint's `quantization_config`, untouched."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer: the normed latent, then the rotated key (MLA)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The attention scale: 1/sqrt(qk_head_dim), times YaRN's mscale squared (DeepSeek-V3)."""
        return softmax_scale(self.qk_head_dim, self.yarn)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Build the spec from a parsed `config.json`.

        Raises:
            CheckpointError: the architecture is not supported, or a key is missing or has the wrong
                type; the message names the key.
        """
        if "text_config" in config and config.get("model_type") not in SUPPORTED_MODEL_TYPES:
            config = _as_object(config, "text_config")
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise CheckpointError(
                f"config.json: model_type {_shown(model_type)} is not supported; "
                f"this engine serves {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        _refuse_unsupported(config)
        rope = rope_settings(config)
        fields: dict[str, Any] = {name: config[name] for name in _COPIED if name in config}
        missing = [name for name in (*_COPIED, *_GROUPS) if name not in config]
        if missing:
            raise CheckpointError(
                f"config.json: missing {', '.join(missing)}; copy the model's own file"
            )
        fields |= {
            "q_lora_rank": config.get("q_lora_rank"),
            "n_shared_experts": config["n_shared_experts"] or 0,
            **{name: config[name] or 1 for name in _GROUPS},
            "rope_theta": rope["rope_theta"],
            "rope_interleave": config.get("rope_interleave", True),
            "yarn": yarn_settings(rope, config),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            "attention_bias": config.get("attention_bias", False),
            "num_nextn_predict_layers": config.get("num_nextn_predict_layers") or 0,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            "bos_token_id": config.get("bos_token_id"),
            "eos_token_ids": _as_list(config.get("eos_token_id")),
            "quantization": config.get("quantization_config"),
        }
        try:
            spec = msgspec.convert(fields, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise CheckpointError(f"config.json: {error}") from error
        _check_ranges(spec)
        return spec


def softmax_scale(qk_head_dim: int, yarn: YarnScaling | None) -> float:
    """Return the scale of MLA's scores: 1/sqrt(qk_head_dim), times YaRN's mscale squared."""
    scale = 1.0 / math.sqrt(qk_head_dim)
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature 0.1 * mscale * ln(factor) + 1 (1 when `factor` <= 1)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_COPIED = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor", "vocab_size",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_GROUPS = ("n_group", "topk_group")
"""Null stands for one group. Without the keys, transformers would take 8 and 4."""
_FULL = "full_attention"


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    only = {
        "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "moe_layer_freq": 1, "is_causal": True, "sliding_window": None,
        "attention_chunk_size": None,
    }  # fmt: skip
    for key, wanted in only.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise CheckpointError(
                f"config.json: {key}={_shown(value)} is not supported, only {wanted!r}"
            )
    if any(kind != _FULL for kind in _as_list(config.get("layer_types"))):
        raise CheckpointError(f"config.json: layer_types has others than {_FULL!r}")


def _shown(value: object) -> str:
    """Return a value as text for an error message, at most a line long."""
    return repr(value)[:80]


def _as_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under `key`, or an empty one when it is missing. Raises CheckpointError
    when the value is no object.
    """
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {_shown(value)}")
    return value


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope settings of a parsed `config.json`, in whichever form it has them. The older
    form wins, as in transformers.

    Raises:
        CheckpointError: `rope_theta` is missing.
    """
    rope = {**(_as_object(config, "rope_scaling") or _as_object(config, "rope_parameters"))}
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if rope["rope_theta"] is None:
        raise CheckpointError(
            "config.json: rope_theta (or rope_parameters.rope_theta) is missing; copy the model's "
            "own file"
        )
    return rope


def yarn_settings(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a `YarnScaling`, not yet checked, or None if positions are not scaled.

    Raises:
        CheckpointError: it is another scaling than YaRN, or lacks what that needs.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(
            f"config.json: rope type {_shown(kind)} is not supported, only 'yarn'"
        )
    if "factor" not in rope:
        raise CheckpointError("config.json: the yarn rope settings lack 'factor'")
    for key, neutral in _NEUTRAL.items():
        value = rope.get(key, config.get(key))
        if value is not None and value != neutral:
            raise CheckpointError(
                f"config.json: the yarn rope setting {key}={_shown(value)} is not supported, only "
                f"{neutral!r}"
            )
    key = "max_position_embeddings"
    # Beside the rope settings it wins over the number in them, as in transformers.
    places = (config.get(f"original_{key}"), rope.get(f"original_{key}"), config.get(key))
    original = next(filter(None, places), None)
    if original is None:
        raise CheckpointError(f"config.json: the yarn rope settings lack 'original_{key}'")
    return {
        "factor": rope["factor"],
        "original_max_position": original,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0,
    }


_NEUTRAL = {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}
"""What transformers knows beside the settings of `YarnScaling` -> the only value supported."""


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _check_ranges(spec: ModelSpec) -> None:
    checks = {
        "num_experts_per_tok <= n_routed_experts": spec.num_experts_per_tok
        <= spec.n_routed_experts,
        "n_group divides n_routed_experts": spec.n_routed_experts % spec.n_group == 0,
        "topk_group <= n_group": spec.topk_group <= spec.n_group,
        "num_experts_per_tok <= experts in topk_group groups": spec.num_experts_per_tok
        <= spec.n_routed_experts // spec.n_group * spec.topk_group,
        "qk_rope_head_dim is even": spec.qk_rope_head_dim % 2 == 0,
    }
    for rule, holds in checks.items():
        if not holds:
            raise CheckpointError(f"config.json: {rule} does not hold")
