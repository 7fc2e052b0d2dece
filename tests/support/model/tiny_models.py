"""Tiny models for torch tests: transformers' own as the truth, and ours loaded from its weights.
Only who asks for the truth imports transformers: each process would take three CPU seconds for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mooncake.base import CheckpointError, KvLayout, ModelSpec
from mooncake.base.kv_layout import ALL_PAGES, Home
from mooncake.engine.plan import StepSlot
from mooncake.model.checkpoint.tensor_cuts import Part, tensor_shapes
from mooncake.model.inputs import PrefersAbsorbed, build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import QuantizedWeight, load_model

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

CPU = torch.device("cpu")

# Weights this wide make logits differ by units: flat random logits would turn rounding into ties.
_INITIALIZER_RANGE = 0.25

_BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "initializer_range": _INITIALIZER_RANGE,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uncompressed queries": {"q_lora_rank": None, "attention_bias": True},
    "grouped routing": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "yarn": {"rope_parameters": _YARN},
    "tied, halves, two shared": {
        "tie_word_embeddings": True,
        "rope_interleave": False,
        "n_shared_experts": 2,
    },
}
"""Configurations by what is special about them."""


def truth(name: str, seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """Return transformers' model of `CONFIGS[name]` with `changes`, in float32, its weights and
    biases seeded.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(_BASE | CONFIGS[name] | changes))).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith(("e_score_correction_bias", "_proj.bias", "kv_a_proj_with_mqa.bias")):
                tensor.normal_(std=0.2)
            if key.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
    return model


class DictSource:
    """A weight source over a dictionary of tensors (`kimi_k2.WeightSource`)."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.tensors = tensors

    def check_names(self, expected: Iterable[str]) -> None:
        behind = f"model.layers.{self.spec.num_hidden_layers}."  # its MTP layer, if it has one
        wrong = set(expected) ^ {name for name in self.tensors if not name.startswith(behind)}
        if wrong:
            raise CheckpointError(f"missing or unknown: {', '.join(sorted(wrong))}")

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        assert self.tensors[name].shape == shape
        whole = self.tensors[name]
        return whole if part is None else whole.narrow(part.dim, part.first, part.size)

    def quantized(
        self, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> QuantizedWeight | None:
        return None


def source_of(model: DeepseekV3ForCausalLM) -> DictSource:
    """Return the weights of transformers' model under the names a checkpoint has."""
    spec = ModelSpec.from_config(model.config.to_dict())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(weight.chunk(2) for weight in tensor):
                prefix = name.replace("gate_up_proj", str(expert))
                tensors |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = weight
        elif not (spec.tie_word_embeddings and name == "lm_head.weight"):
            tensors[name] = tensor
    return DictSource(spec, tensors)


def random_source(
    spec: ModelSpec, seed: int = 0, std: float = 0.1, with_mtp: bool = False
) -> DictSource:
    """Return seeded random weights of any shape of model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * std
        for name, shape in tensor_shapes(spec, with_mtp=with_mtp).items()
    }
    return DictSource(spec, tensors)


def ours(source: DictSource, dtype: torch.dtype = torch.float32) -> KimiK2:
    """Return our model of the same weights."""
    return load_model(source, dtype=dtype, device=CPU)


def kv_for(
    spec: ModelSpec, num_pages: int = 64, block_tokens: int = 16, home: Home = ALL_PAGES
) -> KvTensors:
    """Return float32 pages: of `num_pages` the share of `home`."""
    pages = KvTensors.allocate(layout_for(spec, block_tokens), num_pages // home.num_homes, CPU)
    return KvTensors(pages.layout, pages.pages, home)


def layout_for(spec: ModelSpec, block_tokens: int = 16, with_mtp: bool = False) -> KvLayout:
    """Return a float32 layout."""
    return KvLayout.for_model(
        spec, block_tokens=block_tokens, dtype="float32", weights_revision="test", with_mtp=with_mtp
    )


def slot(
    sequence_id: int,
    start: int,
    tokens: Sequence[int],
    pages: Sequence[int],
    sample: bool = True,
    drafts: Sequence[int] = (),
) -> StepSlot:
    """Return a slot."""
    return StepSlot(
        sequence_id=sequence_id,
        start=start,
        tokens=[*tokens, *drafts],
        pages=list(pages),
        sample=sample,
        num_drafts=len(drafts),
    )


def forward(
    model: KimiK2,
    kv: KvTensors,
    slots: Sequence[StepSlot],
    *,
    whole: bool = False,
    rule: PrefersAbsorbed | None = None,
) -> dict[int, torch.Tensor]:
    """Return sequence id -> logits [rows, vocab] of the slots that sample; `whole`: of all rows."""
    rule = rule or model.prefers_absorbed
    wanted = frozenset(entry.sequence_id for entry in slots) if whole else frozenset()
    with torch.inference_mode():
        inputs = build_inputs(slots, wanted, kv.page_shape, rule, home=kv.home)
        model.between_steps()
        hidden = model.forward(inputs, kv)
        if not model.stage.is_last:
            return {}
        logits = model.logits(hidden)
    return {
        rows.slot.sequence_id: logits[rows.first : rows.first + rows.num_rows]
        for rows in inputs.output_rows
    }


def random_tokens(count: int, seed: int, vocab_size: int = 211) -> list[int]:
    """Return seeded tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
