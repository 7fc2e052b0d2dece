"""Memory for weights, steps and KV pages, computed from the spec alone, without torch or a device.

`--dry-run` and start-up use it. The numbers are computed, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_kernels.native import build

from mooncake.base import DTYPE_BYTES, ConfigError, ModelSpec, Shape, format_bytes
from mooncake.model.checkpoint.quant_format import (
    FP8_BLOCK,
    INT4_GROUP,
    Fp8Block,
    QuantFormat,
    fp8_scale_shape,
    is_quantized,
)
from mooncake.model.checkpoint.tensor_cuts import (
    ROUTED,
    cut_of,
    is_held,
    is_of_mtp,
    part_shape,
    tensor_shapes,
)
from mooncake.model.options import ModelOptions

_ROUTER, _ROUTER_BIAS = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
_ALONE = Shape()
_WIDENED = "kv_b_proj.weight"
"""This weight is never kept in FP8, because attention multiplies with its two halves separately."""
_JOINED = (
    ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("q_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("gate_proj.weight", "up_proj.weight"),
)


@dataclass(frozen=True)
class GpuMemory:
    """Memory measured on a GPU after the weights were loaded."""

    total_bytes: int
    resident_bytes: int
    """Memory in use by weights, libraries and other processes."""
    step_bytes: int
    """The extra memory that the largest step took while it ran."""

    def beside(self, num_bytes: int) -> GpuMemory:
        """Return the same with `num_bytes` more in use."""
        return replace(self, resident_bytes=self.resident_bytes + num_bytes)


def room_for_pages(memory: GpuMemory, utilization: float, block_bytes: int) -> int:
    """Return how many KV pages fit; below 0 when even the rest does not fit."""
    budget = int(memory.total_bytes * utilization)
    return (budget - memory.resident_bytes - 2 * memory.step_bytes) // block_bytes


def pages_that_fit(
    ranks: Sequence[GpuMemory], *, utilization: float, page_bytes: Sequence[int], least_pages: int
) -> int:
    """Return how many KV pages are left on each of the ranks of `utilization` of its memory,
    captured steps reserved. page_bytes: of a page on each, whose stage has some of the layers.

    Captured steps keep their own workspace: never larger than the largest step's, so that
    much is kept back a second time.

    Raises:
        ConfigError: fewer than `least_pages` fit; says what takes the room.
    """
    rooms = [
        room_for_pages(memory, utilization, each)
        for memory, each in zip(ranks, page_bytes, strict=True)
    ]
    pages = min(rooms)
    rank, memory = rooms.index(pages), ranks[rooms.index(pages)]
    where = f" on rank {rank}" if len(ranks) > 1 else ""
    if pages < least_pages:
        raise ConfigError(
            f"gpu-memory-utilization: {utilization:g} of {format_bytes(memory.total_bytes)} "
            f"leaves{where} room for {max(0, pages)} KV pages beside "
            f"{format_bytes(memory.resident_bytes)} in use and "
            f"{format_bytes(2 * memory.step_bytes)} for steps; one sequence of full length "
            f"takes {least_pages}; lower `max-model-len` or `max-num-batched-tokens`"
        )
    return pages


@dataclass(frozen=True)
class Kept:
    """Quantized weights that stay in memory as they are stored, with the allowed widths."""

    format: QuantFormat
    multiple_of: int = 1


def kept_by(options: ModelOptions, dtype: str, stored: QuantFormat | None) -> Kept | None:
    """Return what engines with these options keep of a checkpoint `stored` in this format, or None
    if all weights are widened.

    Triton multiplies with quantized weights, and on the CPU so does bfloat16 code that is compiled
    when the model is loaded.
    """
    if stored is None:
        return None
    if _by_triton(options):
        return Kept(stored)
    return None if options.device != "cpu" else _kept_by_host(options, dtype, stored)


def _by_triton(options: ModelOptions) -> bool:
    """Whether Triton computes routers, and experts that are with the model; see
    `backends.settle`.
    """
    if options.device == "cpu":
        return options.moe_backend == "triton"  # in its interpreter
    # moe-backend is that of the experts, wherever they are.
    return options.experts_apart or options.moe_backend in ("auto", "triton")


def keeps_router(options: ModelOptions, dtype: str, spec: ModelSpec) -> bool:
    """Whether engines with these options keep routers as they are stored, in 16 bits. This is the
    rule of `Backends.keeps_router`, for checkpoints whose routers have the dtype of everything that
    is not quantized.
    """
    return _by_triton(options) and not options.deterministic and dtype == spec.dtype == "bfloat16"


def _kept_by_host(
    options: ModelOptions, dtype: str, stored: QuantFormat, *, elsewhere: bool = False
) -> Kept | None:
    if dtype != "bfloat16" or options.moe_backend not in ("auto", "native"):
        return None
    if options.deterministic:
        return None  # sums of one order are those of widened weights
    folder = None if options.cache_dir is None else Path(options.cache_dir)
    can = elsewhere or build.unlikely(folder) is None
    return Kept(stored, build.WIDTH) if can else None


@dataclass(frozen=True)
class HeldWeights:
    """The size in bytes of one rank's weights."""

    on_device: int
    in_dram: int
    """The routed experts beside a model on a GPU."""


def held_weights(
    spec: ModelSpec,
    dtype: str,
    options: ModelOptions,
    stored: QuantFormat | None,
    *,
    shape: Shape = _ALONE,
    layers: range | None = None,
    elsewhere: bool = False,
    only_experts: bool = False,
) -> HeldWeights:
    """Return what a rank of `shape` with these options holds of a checkpoint `stored` in this
    format. In one of several stages this covers only `layers`.

    elsewhere: on another machine, where code can be compiled. only_experts: of a worker that holds
    routed experts for ranks of `shape`, and nothing else.
    """
    kept = kept_by(options, dtype, stored)
    router = "bfloat16" if keeps_router(options, dtype, spec) else "float32"
    redundant = options.eplb.num_redundant_experts if options.eplb and shape.ep > 1 else 0
    if not options.experts_apart:
        held = weights_bytes(
            spec, dtype, shape=shape, layers=layers, redundant=redundant, kept=kept,
            with_mtp=options.with_mtp, drafts=options.drafts, router=router,
            only_experts=only_experts,
        )  # fmt: skip
        return HeldWeights(held, 0)
    beside = None
    if stored is not None:
        beside = _kept_by_host(options, dtype, stored, elsewhere=elsewhere)
    parts = _parts(spec, shape, layers, options.with_mtp, options.drafts, only_experts)
    on_device = in_dram = 0
    for name in parts:
        if ROUTED in name:
            in_dram += _num_alike(spec, shape, redundant, name) * _held_bytes(
                name, parts, dtype, beside, router
            )
        else:
            on_device += _held_bytes(name, parts, dtype, kept, router)
    return HeldWeights(on_device, in_dram)


def weights_bytes(
    spec: ModelSpec,
    dtype: str,
    *,
    shape: Shape = _ALONE,
    layers: range | None = None,
    redundant: int = 0,
    kept: Kept | None = None,
    with_mtp: bool = False,
    drafts: bool = False,
    router: str = "float32",
    only_experts: bool = False,
) -> int:
    """Return the bytes of the weights that a rank of `shape` holds: its parts (see `tensor_cuts`),
    only of `layers` when others have the rest. Routers are stored as `router`, their biases as
    float32, the rest in `dtype`.

    redundant: copies of routed experts that the ranks hold beside one of each. kept: the weights
    that stay as stored; None: quantized weights are widened when they are loaded. with_mtp: also
    count the MTP layer. drafts: see `is_held`. only_experts: see `held_weights`.
    """
    parts = _parts(spec, shape, layers, with_mtp, drafts, only_experts)
    return sum(
        _num_alike(spec, shape, redundant, name) * _held_bytes(name, parts, dtype, kept, router)
        for name in parts
    )


def _parts(
    spec: ModelSpec, shape: Shape, layers: range | None, with_mtp: bool, drafts: bool,
    only_experts: bool,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return the shape of one rank's part of each tensor. One routed expert of a layer stands for
    all, because they are alike. Others of its stage hold as much.
    """
    return {
        name: part_shape(whole, cut_of(spec, name, shape.tp, whole_experts=shape.ep > 1), shape.tp)
        for name, whole in tensor_shapes(spec, one_expert=True, with_mtp=with_mtp).items()
        if layers is None or is_held(spec, name, layers, drafts=drafts)
        if not shape.experts or (ROUTED in name and not is_of_mtp(spec, name)) == only_experts
        if not (only_experts and is_of_mtp(spec, name))
    }


def _num_alike(spec: ModelSpec, shape: Shape, redundant: int, name: str) -> int:
    """Return how many tensors of a rank one tensor of `tensor_shapes` stands for. `redundant`: the
    number of second copies of experts on all ranks.
    """
    if ROUTED not in name:
        return 1
    if is_of_mtp(spec, name):
        return spec.n_routed_experts // (shape.tp if shape.ep > 1 else 1)
    return (spec.n_routed_experts + redundant) // shape.ep


def _held_bytes(
    name: str, parts: Mapping[str, tuple[int, ...]], dtype: str, kept: Kept | None, router: str
) -> int:
    """Return the bytes of a tensor in memory, including factors of quantized blocks."""
    shape = parts[name]
    size = math.prod(shape)
    if name.endswith(_ROUTER):
        return size * DTYPE_BYTES[router]
    if name.endswith(_ROUTER_BIAS):
        return size * DTYPE_BYTES["float32"]
    if kept is None or not is_quantized(kept.format, name):
        return size * DTYPE_BYTES[dtype]
    expert = ROUTED in name
    if isinstance(kept.format, Fp8Block):
        stays = _fits(shape, kept) if expert else _stays_fp8(name, parts, kept)
        if stays and kept.format.block == (FP8_BLOCK, FP8_BLOCK):
            factors = math.prod(fp8_scale_shape(shape, kept.format.block))
            return size + factors * DTYPE_BYTES["float32"]
    elif expert and kept.format.group_size == INT4_GROUP and not shape[1] % INT4_GROUP:
        packed = size // 2 + size // INT4_GROUP * DTYPE_BYTES[dtype]
        return packed if _fits(shape, kept) else size * DTYPE_BYTES[dtype]
    return size * DTYPE_BYTES[dtype]


def _fits(shape: tuple[int, ...], kept: Kept) -> bool:
    return not any(width % kept.multiple_of for width in shape)


def _stays_fp8(name: str, parts: Mapping[str, tuple[int, ...]], kept: Kept) -> bool:
    """Whether a dense weight stays FP8. It does not when attention cuts it, a bias is added, or the
    layer that it is joined into would not have whole blocks.
    """
    joined = [name]
    for first, second in _JOINED:
        stem = name.removesuffix(first).removesuffix(second)
        if stem != name and stem + first in parts and stem + second in parts:
            joined = [stem + first, stem + second]
            if parts[stem + first][0] % FP8_BLOCK:
                return False
    return not any(
        other.endswith(_WIDENED)
        or other.removesuffix("weight") + "bias" in parts
        or not _fits(parts[other], kept)
        for other in joined
    )


def workspace_bytes(
    spec: ModelSpec, dtype: str, *, step_tokens: int, step_sequences: int, num_ranks: int = 1
) -> int:
    """Return an upper estimate of the memory that one step of `step_tokens` needs beside weights
    and KV on one of `num_ranks` ranks.

    It counts the widest moments of a layer as if they happened together, and float32 logits.
    """
    heads = spec.num_attention_heads // num_ranks
    attention = 2 * heads * spec.qk_head_dim + heads * spec.v_head_dim + spec.kv_width
    inner = 3 * spec.moe_intermediate_size // num_ranks
    routed = spec.num_experts_per_tok * (2 * spec.hidden_size + inner)
    dense = 3 * spec.intermediate_size // num_ranks
    width = 4 * spec.hidden_size + max(attention, routed, dense)
    activations = step_tokens * width * DTYPE_BYTES[dtype]
    return activations + step_sequences * spec.vocab_size * 2 * DTYPE_BYTES["float32"]


def num_communicators(shape: Shape, stage: int) -> int:
    """Return how many NCCL communicators a rank of `stage` makes; each takes memory of its GPU.
    There is one for each group of ranks: those of its engine, of its stage, those that share out
    contexts, and those of other engines that share experts. There is one more for each stage beside
    its own, because two ranks that send and receive are a pair of their own.
    """
    groups = {size for size in (shape.num_ranks, shape.tp, shape.dcp) if size > 1}
    pairs = (stage > 0) + (stage < shape.pp - 1)
    return len(groups) + pairs + (shape.num_sharers > 1)


def communication_bytes(
    spec: ModelSpec,
    dtype: str,
    shape: Shape,
    *,
    step_tokens: int,
    step_sequences: int,
    max_model_len: int,
) -> int:
    """Return how many bytes one rank keeps for exchanges with the others. These are a float32 sum
    and a gathered embedding of the largest step. Where ranks share out KV, add the queries and
    outputs of all heads and the latents of the longest context of one layer. Between stages, add
    the activations of two steps. Where instances share experts, add the rows of all of them with
    their experts' outputs.
    """
    each = DTYPE_BYTES[dtype]
    rows = step_tokens * spec.hidden_size
    total = 2 * rows * each if shape.pp > 1 else 0
    if shape.num_sharers > 1:
        total += 2 * shape.num_sharers * rows * each
    if shape.tp > 1:
        total += rows * (DTYPE_BYTES["float32"] + each)
    if shape.dcp > 1:
        heads = step_sequences * spec.num_attention_heads
        total += heads * (spec.kv_width * each + (spec.kv_lora_rank + 1) * DTYPE_BYTES["float32"])
        total += max_model_len * spec.kv_width * each
    return total
