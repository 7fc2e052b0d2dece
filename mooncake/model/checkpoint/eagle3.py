"""The checkpoint of an EAGLE-3 head: what its `config.json` says, and which tensors it has.

The format is that of published heads (arXiv 2503.01840): `LlamaForCausalLMEagle3`, or with MLA
`Eagle3DeepseekV2ForCausalLM`. A head is one decoder layer, whose input is a token's embedding
beside a state made of several of the model's states, and an output over a part of the vocabulary.
Pure: reads headers only, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import CheckpointError, ModelSpec
from mooncake.base.models.model_spec import (
    Count,
    Factor,
    Size,
    YarnScaling,
    rope_settings,
    softmax_scale,
    yarn_settings,
)
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles, Homes
from mooncake.model.checkpoint.files.safetensors_file import StoredTensor
from mooncake.model.checkpoint.tensor_cuts import Shapes

GROUPED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TO_TARGET, IS_DRAFTED = "d2t", "t2d"
"""The offset from each drafted token's number to the model's; and whether each of the model's
tokens is drafted.
"""
WINDOW = 512
"""A row sees at least this many rows before it; at most twice as many are kept. A head with keys of
all heads has half the KV of its model, one with MLA a sixtieth.
"""
AT_ONCE = 8
"""How many windows a captured step copies at a time, which bounds their memory."""

_FLOATS = ("BF16", "F16", "F32")
_FALSE = ("attention_bias", "mlp_bias", "bias")
_SAME = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size")


class GroupedHeads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attention whose heads share keys and values in groups, as Llama's."""

    num_key_value_heads: Size
    head_dim: Size
    rope_theta: Factor
    rope_interleave: bool = False
    yarn: None = None

    @property
    def qk_rope_head_dim(self) -> int:
        return self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers cached per token: keys and values of all key-value heads."""
        return 2 * self.num_key_value_heads * self.head_dim

    def shapes(self, hidden: int, heads: int) -> Shapes:
        """Return the tensors of `self_attn`."""
        queries, keys = heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (queries, 2 * hidden),
            "k_proj": (keys, 2 * hidden),
            "v_proj": (keys, 2 * hidden),
            "o_proj": (hidden, queries),
        }


class LatentHeads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """MLA, as the model's (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope_theta: Factor
    rope_interleave: bool
    yarn: YarnScaling | None

    @property
    def kv_width(self) -> int:
        """Numbers cached per token: the normed latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return softmax_scale(self.qk_head_dim, self.yarn)

    def shapes(self, hidden: int, heads: int) -> Shapes:
        """Return the tensors of `self_attn`."""
        queries, read = heads * self.qk_head_dim, 2 * hidden
        rank = self.q_lora_rank
        return {
            **(
                {"q_proj": (queries, read)}
                if rank is None
                else {
                    "q_a_proj": (rank, read),
                    "q_a_layernorm": (rank,),
                    "q_b_proj": (queries, rank),
                }
            ),
            "kv_a_proj_with_mqa": (self.kv_width, read),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "kv_b_proj": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj": (hidden, heads * self.v_head_dim),
        }


class Eagle3Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and settings of a head; field names follow `config.json` where it has them."""

    hidden_size: Size
    target_hidden_size: Size
    """The size of the model's states."""
    intermediate_size: Size
    num_attention_heads: Size
    attention: GroupedHeads | LatentHeads
    rms_norm_eps: Factor
    vocab_size: Size
    draft_vocab_size: Size
    layers: tuple[Count, ...]
    """The layers of the model whose inputs the head reads (vLLM's count: 0 is the embedding). The
    number of layers stands for the output of the last one.
    """
    norm_before_residual: bool = False
    norm_output: bool = False
    """Whether the state for the next draft is taken after the last norm."""
    fc_norm: bool = False
    """Whether each state is normed before the states are joined."""

    def window_bytes(self, num_sequences: int, item_bytes: int) -> int:
        """Return the bytes of the KV of `num_sequences` sequences, with numbers of `item_bytes`
        each: their windows, and one that no one needs.
        """
        return (num_sequences + 1) * 2 * WINDOW * self.attention.kv_width * item_bytes

    def copied_bytes(self, num_sequences: int, item_bytes: int) -> int:
        """Return the bytes of the windows that a captured step of this many sequences copies."""
        copied = min(num_sequences, AT_ONCE)
        return copied * 2 * WINDOW * self.attention.kv_width * item_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: ModelSpec) -> Eagle3Spec:
        """Return the spec of a parsed `config.json` for a head of `model`.

        Raises:
            CheckpointError: it is not a head that can be served, or is the head of another model;
                the message names the key.
        """
        _refuse_unsupported(config)
        missing = [key for key in _SAME if config.get(key) is None]
        if missing:
            raise CheckpointError(f"config.json: missing {', '.join(missing)}")
        try:
            spec = msgspec.convert(
                {key: config[key] for key in _SAME}
                | {
                    "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
                    "attention": _attention(config),
                    "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
                    "layers": _layers(config, model.num_hidden_layers),
                    "norm_before_residual": config.get("norm_before_residual") or False,
                    "norm_output": config.get("norm_output") or False,
                    "fc_norm": config.get("fc_norm") or False,
                },
                cls,
            )
        except (msgspec.ValidationError, TypeError, ZeroDivisionError) as error:
            raise CheckpointError(f"config.json: {error}") from error
        _check_model(spec, model)
        return spec


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Eagle3Spec.attention`, not yet checked."""
    rope = _rope(config)
    known = {"rope_theta": rope["rope_theta"]}
    if not _is_one_of(config, LATENT):
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        sizes = {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
        }
        return {"type": GroupedHeads.__name__, **sizes, **known}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if missing := [name for name in names if config.get(name) is None]:
        raise CheckpointError(f"config.json: missing {', '.join(missing)}")
    known |= {name: config[name] for name in names} | {
        "q_lora_rank": config.get("q_lora_rank"),
        "rope_interleave": config.get("rope_interleave", True),
        "yarn": yarn_settings(rope, config),
    }
    return {"type": LatentHeads.__name__, **known}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return rope_settings({**config, "rope_theta": config.get("rope_theta") or 10000.0})


def _is_one_of(config: Mapping[str, Any], names: Sequence[str]) -> bool:
    return any(name in names for name in config.get("architectures") or [])


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if not _is_one_of(config, GROUPED + LATENT):
        raise CheckpointError(
            f"config.json: architectures {config.get('architectures')!r:.80} is not an EAGLE-3 "
            f"head that can be served; {', '.join(GROUPED + LATENT)} are"
        )
    wanted = {"num_hidden_layers": 1, "hidden_act": "silu", "quantization_config": None}
    for key, value in {**wanted, **dict.fromkeys(_FALSE, False)}.items():
        if (found := config.get(key)) is not None and found != value:
            raise CheckpointError(f"config.json: {key}={found!r:.80} is not supported")
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and not _is_one_of(config, LATENT):
        raise CheckpointError(f"config.json: rope type {kind!r:.80} is not supported in a head")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise CheckpointError("config.json: use_aux_hidden_state=False is not supported")


def _layers(config: Mapping[str, Any], num_layers: int) -> tuple[Any, ...]:
    """Return which states the head reads: vLLM's choice when the configuration names none."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = config.get(key) or (config.get("eagle_config") or {}).get(key)
    layers = tuple(named or (2, num_layers // 2, num_layers - 3))
    whole = all(isinstance(each, int) and 0 <= each <= num_layers for each in layers)
    if not whole or len(set(layers)) < len(layers) or list(layers) != sorted(layers):
        raise CheckpointError(
            f"config.json: {key}={list(layers)!r:.80} must be layers of the model, 0 to "
            f"{num_layers}, in order"
        )
    return layers


def _check_model(spec: Eagle3Spec, model: ModelSpec) -> None:
    for key, own, theirs in (
        ("vocab_size", spec.vocab_size, model.vocab_size),
        ("target_hidden_size", spec.target_hidden_size, model.hidden_size),
    ):
        if own != theirs:
            raise CheckpointError(
                f"config.json: {key}={own} is not the model's ({theirs}): this is the head of "
                "another model"
            )
    attention = spec.attention
    rules = {"draft_vocab_size <= vocab_size": spec.draft_vocab_size <= spec.vocab_size}
    if isinstance(attention, GroupedHeads):
        groups = spec.num_attention_heads % attention.num_key_value_heads
        rules["num_key_value_heads divides num_attention_heads"] = groups == 0
        rules["head_dim is even"] = attention.head_dim % 2 == 0
    else:
        rules["qk_rope_head_dim is even"] = attention.qk_rope_head_dim % 2 == 0
    for rule, holds in rules.items():
        if not holds:
            raise CheckpointError(f"config.json: {rule} does not hold")


def eagle3_shapes(spec: Eagle3Spec) -> Shapes:
    """Return the tensors that every head has. Weights are [out, in]."""
    hidden, inner, read = spec.hidden_size, spec.intermediate_size, len(spec.layers)
    shapes: Shapes = {"fc.weight": (hidden, read * spec.target_hidden_size)}
    if spec.fc_norm:
        shapes |= {f"fc_norm.{at}.weight": (spec.target_hidden_size,) for at in range(read)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (hidden,)
    for name, shape in spec.attention.shapes(hidden, spec.num_attention_heads).items():
        shapes[f"midlayer.self_attn.{name}.weight"] = shape
    for name in ("gate_proj", "up_proj"):
        shapes[f"midlayer.mlp.{name}.weight"] = (inner, hidden)
    shapes["midlayer.mlp.down_proj.weight"] = (hidden, inner)
    shapes["norm.weight"] = (hidden,)
    return shapes


@dataclass(frozen=True)
class Eagle3Files:
    """Opens and checks a head's directory in Hugging Face's layout."""

    path: Path
    spec: Eagle3Spec
    homes: Homes
    """The tensors by the names in `eagle3_shapes`, including optional ones."""

    @classmethod
    def open(cls, path: Path, model: ModelSpec) -> Eagle3Files:
        """Open the head of `model` in the directory `path`. Reads headers only.

        Raises:
            CheckpointError: it is not readable, not complete, or the head of another model. The
                message names the file and, if there is one, the tensor or the configuration key.
        """
        files = CheckpointFiles.open(path)
        try:
            spec = Eagle3Spec.from_config(files.config, model)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error.message}") from None
        homes = {_canonical(name): home for name, home in files.homes.items()}
        found = cls(Path(path), spec, homes)
        found._check()
        return found

    def num_bytes(self, item_bytes: int) -> int:
        """Return the bytes of all its tensors when they are loaded, with numbers of `item_bytes`
        each.
        """
        return item_bytes * sum(math.prod(self._stored(name).shape) for name in self.homes)

    def _stored(self, name: str) -> StoredTensor:
        file, stored_name = self.homes[name]
        return file.tensors[stored_name]

    def _check(self) -> None:
        """Raise CheckpointError when a tensor is missing, unknown, or of another shape or dtype."""
        spec, needed = self.spec, eagle3_shapes(self.spec)
        words = (spec.draft_vocab_size, spec.hidden_size)
        may_be = {EMBEDDING: (spec.vocab_size, spec.hidden_size), HEAD: words}
        tables = {TO_TARGET: (spec.draft_vocab_size,), IS_DRAFTED: (spec.vocab_size,)}
        if spec.hidden_size != spec.target_hidden_size:
            needed |= may_be  # the model's own tensors do not fit
        elif spec.draft_vocab_size < spec.vocab_size:
            needed |= {HEAD: words}
        if spec.draft_vocab_size < spec.vocab_size:
            needed |= {TO_TARGET: tables[TO_TARGET]}
        allowed = needed | may_be | tables
        for kind, names in (
            ("missing", needed.keys() - self.homes), ("unknown", self.homes.keys() - allowed)
        ):  # fmt: skip
            if names:
                raise CheckpointError(f"{self.path}: {kind} tensors: {', '.join(sorted(names))}")
        for name in self.homes:
            stored = self._stored(name)
            kinds = {TO_TARGET: ("I64", "I32"), IS_DRAFTED: ("BOOL",)}.get(name, _FLOATS)
            if stored.shape != allowed[name]:
                raise CheckpointError(
                    f"{name} in {self.path}: has shape {list(stored.shape)}, the head needs "
                    f"{list(allowed[name])}"
                )
            if stored.dtype not in kinds:
                raise CheckpointError(
                    f"{name} in {self.path}: dtype {stored.dtype} is not supported, only "
                    f"{', '.join(kinds)}"
                )


def _canonical(name: str) -> str:
    """Return a tensor's name as most heads write it. Some heads use the names of vLLM or
    transformers.
    """
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return name
