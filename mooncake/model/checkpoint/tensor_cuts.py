"""Names and shapes of a checkpoint's tensors, from the spec alone, in HF's DeepseekV3 layout; and
which part of each a rank holds under tensor parallelism. Pure. Loading, checking and writing
checkpoints all use the one list of tensors; the memory plan and the loader both use the one table
of cuts.

Heads, expert and MLP columns, and the vocabulary are cut. Norms, latent projections (`q_a_proj`,
`kv_a_proj_with_mqa`) and the router are whole on every rank. The embedding is cut by hidden
columns, because gathering columns is exact where adding masked rows is a sum; a tied embedding is
whole. Routed experts are cut like MLPs, or with expert parallelism each rank holds some of them
whole. In a pipeline, each stage has its layers. The first also has the embedding, the last the norm
and head after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.base import ConfigError, ModelSpec
from mooncake.base.models.parallel import DCP_FLAG, EP_FLAG, TP_FLAG, Shape, divisors
from mooncake.model.checkpoint.quant_format import Fp8Block, QuantFormat, is_quantized

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(spec: ModelSpec, *, one_expert: bool = False, with_mtp: bool = False) -> Shapes:
    """Return every tensor of a model of this shape, in the order of a forward pass.

    Linear weights are [out, in]; experts are one tensor each. `lm_head.weight` is left out when the
    embeddings are tied.

    one_expert: the first routed expert of each layer stands for all. with_mtp: also return the
    tensors of its first MTP layer.
    """
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        dense = layer < spec.first_k_dense_replace
        shapes |= _layer(spec, prefix, dense=dense, one_expert=one_expert)
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    if with_mtp:
        shapes |= mtp_shapes(spec, 0, one_expert=one_expert)
    return shapes


def mtp_shapes(
    spec: ModelSpec, number: int, *, with_copies: bool = False, one_expert: bool = False
) -> Shapes:
    """Return the tensors of MTP layer `number`, which comes after the model's layers (DeepSeek-V3).

    with_copies: also return what a checkpoint repeats there: the model's embedding and head.
    """
    hidden, prefix = spec.hidden_size, f"model.layers.{spec.num_hidden_layers + number}."
    shapes: Shapes = {prefix + f"{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
    shapes |= _layer(spec, prefix, dense=False, one_expert=one_expert)
    shapes[prefix + "shared_head.norm.weight"] = (hidden,)
    if with_copies:
        for name in ("embed_tokens", "shared_head.head"):
            shapes[prefix + f"{name}.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer(spec: ModelSpec, prefix: str, *, dense: bool, one_expert: bool) -> Shapes:
    shapes: Shapes = {prefix + "input_layernorm.weight": (spec.hidden_size,)}
    shapes |= _attention(spec, prefix + "self_attn.")
    shapes[prefix + "post_attention_layernorm.weight"] = (spec.hidden_size,)
    if dense:
        return shapes | _mlp(spec.hidden_size, spec.intermediate_size, prefix + "mlp.")
    return shapes | _moe(spec, prefix + "mlp.", 1 if one_expert else spec.n_routed_experts)


def _attention(spec: ModelSpec, prefix: str) -> Shapes:
    heads = spec.num_attention_heads
    shapes: Shapes = {}
    biased = {}
    if spec.q_lora_rank is None:
        shapes["q_proj.weight"] = (heads * spec.qk_head_dim, spec.hidden_size)
    else:
        shapes["q_a_proj.weight"] = (spec.q_lora_rank, spec.hidden_size)
        shapes["q_a_layernorm.weight"] = (spec.q_lora_rank,)
        shapes["q_b_proj.weight"] = (heads * spec.qk_head_dim, spec.q_lora_rank)
        biased["q_a_proj.bias"] = (spec.q_lora_rank,)
    shapes["kv_a_proj_with_mqa.weight"] = (spec.kv_width, spec.hidden_size)
    shapes["kv_a_layernorm.weight"] = (spec.kv_lora_rank,)
    expanded = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    shapes["kv_b_proj.weight"] = (expanded, spec.kv_lora_rank)
    shapes["o_proj.weight"] = (spec.hidden_size, heads * spec.v_head_dim)
    biased["kv_a_proj_with_mqa.bias"] = (spec.kv_width,)
    biased["o_proj.bias"] = (spec.hidden_size,)
    if spec.attention_bias:
        shapes |= biased
    return {prefix + name: shape for name, shape in shapes.items()}


def _mlp(hidden: int, inner: int, prefix: str) -> Shapes:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def _moe(spec: ModelSpec, prefix: str, num_experts: int) -> Shapes:
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    shapes: Shapes = {
        prefix + "gate.weight": (spec.n_routed_experts, hidden),
        prefix + "gate.e_score_correction_bias": (spec.n_routed_experts,),
    }
    for expert in range(num_experts):
        shapes |= _mlp(hidden, inner, f"{prefix}experts.{expert}.")
    if spec.n_shared_experts:
        shapes |= _mlp(hidden, inner * spec.n_shared_experts, prefix + "shared_experts.")
    return shapes


ROUTED = ".mlp.experts."
"""A part of the names of routed experts' tensors."""
INT4_WORD = 8
"""The number of columns in one int32 word of packed INT4."""
SLABS = 16
"""The most slabs in a sum of fixed order, and so the most ranks that can share it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (dim 0) or columns (dim 1) [first, stop) of a tensor."""

    dim: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor that is cut along `dim` (0: rows) into equal parts of whole units.

    unit: how many rows or columns stay together (those of one head); `what` names a unit.
    """

    dim: int
    unit: int
    what: str

    def part(self, shape: tuple[int, ...], rank: int, num_ranks: int) -> Part:
        """Return the part of a tensor of `shape` that `rank` holds."""
        each = shape[self.dim] // num_ranks
        return Part(self.dim, rank * each, (rank + 1) * each)


def cut_of(
    spec: ModelSpec, name: str, num_ranks: int, *, whole_experts: bool = False
) -> Cut | None:
    """Return how tensor `name` is cut among `num_ranks` ranks, or None if it is whole on each rank
    that has it.

    The embedding's columns and the vocabulary are cut only where they divide evenly.
    """
    if num_ranks == 1 or (whole_experts and ROUTED in name):
        return None
    last = name.rpartition(".weight")[0].rpartition(".")[2]
    match last:
        case "q_proj" | "q_b_proj":
            return Cut(0, spec.qk_head_dim, "attention heads")
        case "kv_b_proj":
            return Cut(0, spec.qk_nope_head_dim + spec.v_head_dim, "attention heads")
        case "o_proj":
            return Cut(1, spec.v_head_dim, "attention heads")
        case "gate_proj" | "up_proj":
            return Cut(0, 1, _inner(name))
        case "down_proj":
            return Cut(1, 1, _inner(name))
        case "embed_tokens":
            whole = spec.tie_word_embeddings or spec.hidden_size % num_ranks
            return None if whole else Cut(1, 1, "columns of the embedding")
        case "lm_head":
            return None if spec.vocab_size % num_ranks else Cut(0, 1, "words of the vocabulary")
    return None


def is_held(spec: ModelSpec, name: str, layers: range, *, drafts: bool = False) -> bool:
    """Whether the stage with these layers has tensor `name`, or parts of it. The last stage has
    what comes after all layers and, if a layer `drafts` there, the embedding, too.
    """
    if name.startswith("model.layers."):
        return min(_layer_of(name), spec.num_hidden_layers - 1) in layers
    is_first, is_last = 0 in layers, spec.num_hidden_layers - 1 in layers
    if "embed_tokens" in name:
        return is_first or (is_last and (drafts or spec.tie_word_embeddings))
    return is_last


def is_of_mtp(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor is in an MTP layer. Each instance has all of its experts."""
    return name.startswith("model.layers.") and _layer_of(name) >= spec.num_hidden_layers


def _layer_of(name: str) -> int:
    return int(name.split(".", 3)[2])


def part_shape(shape: tuple[int, ...], cut: Cut | None, num_ranks: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor of `shape`."""
    if cut is None:
        return shape
    return tuple(size // num_ranks if dim == cut.dim else size for dim, size in enumerate(shape))


def check_cuts(spec: ModelSpec, quantization: QuantFormat | None, shape: Shape) -> None:
    """Check that every tensor can be cut among ranks of `shape`, with quantized blocks kept whole.

    Raises:
        ConfigError: one cannot; the message names the number, and the sizes that would do.
    """
    whole_experts = shape.ep > 1
    if spec.n_routed_experts % shape.ep:
        able = [number for number in divisors(spec.n_routed_experts) if not number % shape.tp]
        raise ConfigError(
            f"{EP_FLAG}: {spec.n_routed_experts} experts do not divide among {shape.ep} ranks "
            f"({shape}); {', '.join(map(str, able)) or 'no number'} would do"
        )
    problem = _problem(spec, quantization, shape.tp, whole_experts)
    if problem is not None:
        able = cuts(spec, quantization, whole_experts=whole_experts)
        raise ConfigError(f"{TP_FLAG}: {problem}; {said_of_cuts(able)}")


def cuts(
    spec: ModelSpec,
    quantization: QuantFormat | None,
    most: int | None = None,
    *,
    whole_experts: bool = False,
) -> list[int]:
    """Return the numbers of ranks, up to `most`, among which every tensor can be cut, or all but
    experts; smallest first.
    """
    return [
        number
        for number in divisors(spec.num_attention_heads)
        if (most is None or number <= most)
        and _problem(spec, quantization, number, whole_experts) is None
    ]


def said_of_cuts(able: list[int]) -> str:
    """Return advice from the numbers that `cuts` found."""
    if able == [1]:
        return "this model cannot be cut: leave it at 1"
    return f"this model can be cut among {', '.join(map(str, able))} ranks"


def slabs_of(columns: int) -> int:
    """Return into how many slabs a sum of fixed order over `columns` is cut. It is a power
    of two.
    """
    return min(SLABS, columns & -columns)


def check_slabs(spec: ModelSpec, shape: Shape) -> None:
    """Check that ranks of `shape` can sum in the same order as one rank.

    Raises:
        ConfigError: they cannot; the message names the number, and those that would do.
    """
    if shape.dcp > 1:
        raise ConfigError(
            f"{DCP_FLAG}={shape.dcp}: deterministic needs 1, because each rank rounds the result "
            "of its pages before all are merged, and the load decides which rank has which pages"
        )
    summed = {name: size[1] for name, size in _kinds(spec).items() if _is_summed(spec, name)}
    name, columns = min(summed.items(), key=lambda entry: slabs_of(entry[1]))
    slabs = slabs_of(columns)
    if slabs % shape.tp:
        able = [str(number) for number in divisors(slabs)]
        raise ConfigError(
            f"{TP_FLAG}={shape.tp}: deterministic adds the {columns} columns of {name} in "
            f"{slabs} slabs, which can be shared among {', '.join(able)} ranks"
        )


def _is_summed(spec: ModelSpec, name: str) -> bool:
    """Whether ranks have columns of this tensor, so that their results are summed."""
    cut = cut_of(spec, name, 2)
    return cut is not None and cut.dim == 1 and "embed_tokens" not in name


def _problem(
    spec: ModelSpec, quantization: QuantFormat | None, num_ranks: int, whole_experts: bool
) -> str | None:
    if num_ranks == 1:
        return None
    for name, shape in _kinds(spec).items():
        cut = cut_of(spec, name, num_ranks, whole_experts=whole_experts)
        if cut is None:
            continue
        units = shape[cut.dim] // cut.unit
        if units % num_ranks:
            return f"{units} {cut.what} do not divide among {num_ranks} ranks"
        block = _block(quantization, name, cut.dim)
        each = shape[cut.dim] // num_ranks
        if each % block:
            return (
                f"{name} would be cut into {'rows' if cut.dim == 0 else 'columns'} of {each} among "
                f"{num_ranks} ranks, and its quantized blocks are {block} wide"
            )
    return None


def _kinds(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return one tensor of each kind, because layers and experts are alike."""
    shapes = tensor_shapes(spec, one_expert=True)
    first, moe = "model.layers.0.", f"model.layers.{spec.first_k_dense_replace}."
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith("model.layers.") or name.startswith((first, moe))
    }


def _block(quantization: QuantFormat | None, name: str, dim: int) -> int:
    """Return how many rows or columns of a stored tensor share one factor."""
    if not is_quantized(quantization, name):
        return 1
    if isinstance(quantization, Fp8Block):
        return quantization.block[dim]
    assert quantization is not None
    return 1 if dim == 0 else math.lcm(quantization.group_size, INT4_WORD)


def _inner(name: str) -> str:
    if ".experts." in name:
        return "columns of an expert (moe_intermediate_size)"
    if "shared_experts" in name:
        return "columns of the shared experts"
    return "columns of a dense layer (intermediate_size)"
