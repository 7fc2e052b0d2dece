"""The memory of each rank of an instance, computed from the model's shape alone, and what would fit
where it does not.
"""

from __future__ import annotations

import dataclasses
import math

from mooncake.base import ConfigError, KvLayout, ModelSpec, Shape, format_bytes
from mooncake.base.parallel import DCP_FLAG, TP_FLAG, divisors
from mooncake.model.checkpoint.quant_format import INT4_GROUP, Int4Group, QuantFormat
from mooncake.model.checkpoint.tensor_cuts import check_cuts
from mooncake.model.memory import (
    GpuMemory,
    communication_bytes,
    held_weights,
    room_for_pages,
    workspace_bytes,
)
from mooncake.model.options import ModelOptions

HOST_LIBRARY_BYTES = 400 * 2**20
"""Of an engine's process: interpreter, tensor library, Ray."""
GPU_LIBRARY_BYTES = 2**30
"""On a GPU: the CUDA context and loaded kernels. Assumed, not measured."""
GPU_COMMUNICATOR_BYTES = 2**28
"""On a GPU: the channels of one NCCL communicator. Assumed, not measured."""
_LEAST_CONTEXT = 1024
"""A shorter --max-model-len is no advice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What the memory of a rank depends on besides the shape."""

    spec: ModelSpec
    dtype: str
    quantization: QuantFormat | None
    """The checkpoint's format."""
    options: ModelOptions
    elsewhere: bool
    """Whether the plan is for other machines than this one."""
    layout: KvLayout
    step_tokens: int
    step_sequences: int
    max_model_len: int

    @property
    def on_gpu(self) -> bool:
        return self.options.device != "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank, bytes; all ranks of an instance hold the same."""

    shape: Shape
    weights: int
    """Where the rank computes; routed experts in DRAM beside a GPU are `dram`."""
    dram: int
    activations: int
    """Of the largest step."""
    communication: int
    libraries: int
    num_pages: int
    """KV pages of this rank; below 0: the rest does not fit either."""
    block_bytes: int
    gpu_bytes: int | None = None
    """What a GPU's memory and its utilization leave to a rank; None: not known here, or no GPU."""

    @property
    def kv(self) -> int:
        return max(0, self.num_pages) * self.block_bytes

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.overhead

    @property
    def overhead(self) -> int:
        """What is neither weights nor pages."""
        return self.activations + self.communication + self.libraries


def rank_memory(needs: RankNeeds, shape: Shape, num_pages: int) -> RankMemory:
    """Return the memory of a rank of an instance that has `num_pages` pages.

    Where KV is dealt out (`dcp`) each rank has its share of them, else all.
    """
    libraries = GPU_LIBRARY_BYTES if needs.on_gpu else HOST_LIBRARY_BYTES
    communication = communication_bytes(
        needs.spec,
        needs.dtype,
        shape,
        step_tokens=needs.step_tokens,
        step_sequences=needs.step_sequences,
        max_model_len=needs.max_model_len,
    )
    if needs.on_gpu and shape.tp > 1:
        communication += GPU_COMMUNICATOR_BYTES
    held = held_weights(
        needs.spec,
        needs.dtype,
        needs.options,
        needs.quantization,
        num_ranks=shape.tp,
        elsewhere=needs.elsewhere,
    )
    return RankMemory(
        shape=shape,
        weights=held.on_device,
        dram=held.in_dram,
        activations=workspace_bytes(
            needs.spec,
            needs.dtype,
            step_tokens=needs.step_tokens,
            step_sequences=needs.step_sequences,
            num_ranks=shape.tp,
        ),
        communication=communication,
        libraries=libraries,
        num_pages=math.ceil(num_pages / shape.dcp),
        block_bytes=needs.layout.block_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuNode:
    """The GPUs that a plan is for: `num_gpus` of `gpu_bytes` each, `utilization` of them used."""

    name: str
    num_gpus: int
    gpu_bytes: int
    utilization: float
    dram_bytes: int | None
    """Of a node; None: not known."""

    def filled(self, needs: RankNeeds, shape: Shape) -> RankMemory:
        """Return the memory of a rank with all pages that a GPU has room for."""
        rank = rank_memory(needs, shape, 0)
        resident = rank.weights + rank.communication + rank.libraries
        memory = GpuMemory(self.gpu_bytes, resident, rank.activations)
        return dataclasses.replace(
            rank,
            # Captured decode steps keep a workspace of their own, as large as the largest step's.
            activations=2 * rank.activations,
            num_pages=room_for_pages(memory, self.utilization, rank.block_bytes),
            gpu_bytes=int(self.gpu_bytes * self.utilization),
        )

    def check(self, needs: RankNeeds, rank: RankMemory, num_engines: int) -> None:
        """Raise ConfigError where the pages do not fit, or no sequence of full length, or experts
        not into DRAM; the message says what takes the room and what would fit.
        """
        on_a_node = min(num_engines, self.num_gpus // rank.shape.tp)
        check_dram(on_a_node * rank.shape.tp, rank.dram, self.dram_bytes, f"on {self.name}")
        room = self.filled(needs, rank.shape)
        each = rank.shape.dcp * needs.layout.block_tokens
        tokens = max(0, room.num_pages) * each
        wanted = max(needs.max_model_len, rank.num_pages * each)
        if wanted <= tokens:
            return
        usable = int(self.gpu_bytes * self.utilization)
        raise ConfigError(
            f"{rank.shape} on {self.name} does not fit: each rank holds "
            f"{format_bytes(room.weights)} of weights and {format_bytes(room.overhead)} for steps, "
            f"communication and libraries, of {format_bytes(usable)} ({self.utilization:g} of a "
            f"GPU): that leaves room for {tokens} tokens of KV, and {wanted} are wanted; "
            f"{self._cures(needs, rank.shape, tokens)}"
        )

    def _cures(self, needs: RankNeeds, present: Shape, tokens: int) -> str:
        cures = []
        fitting = self._fitting_shape(needs, present)
        if fitting is not None:
            flags = f"--{TP_FLAG} {fitting.tp}" + (
                f" --{DCP_FLAG} {fitting.dcp}" if fitting.dcp > 1 else ""
            )
            cures.append(flags)
        if tokens >= _LEAST_CONTEXT:
            cures.append(f"--max-model-len {tokens}")
        if not isinstance(needs.quantization, Int4Group):
            int4 = dataclasses.replace(needs, quantization=Int4Group(INT4_GROUP, _INT4_IGNORED))
            shape = self._fitting_shape(int4, present)
            if shape is not None:
                cures.append(f"INT4 weights as {shape}")
        if not cures:
            return f"no shape of this model fits the {self.num_gpus} GPUs of a node"
        return "this would: " + ", or ".join(cures)

    def _fitting_shape(self, needs: RankNeeds, present: Shape) -> Shape | None:
        """Return the smallest shape, no smaller than `present`, that fits one node."""
        for tp in divisors(needs.spec.num_attention_heads):
            if not present.tp <= tp <= self.num_gpus:
                continue
            try:
                check_cuts(needs.spec, needs.quantization, tp)
            except ConfigError:
                continue
            for dcp in divisors(tp):
                shape = Shape(tp=tp, dcp=dcp)
                pages = self.filled(needs, shape).num_pages
                if pages * dcp * needs.layout.block_tokens >= needs.max_model_len:
                    return shape
        return None


def check_dram(num_ranks: int, each: int, dram_bytes: int | None, where: str) -> None:
    """Raise ConfigError where the routed experts of `num_ranks` ranks do not fit into DRAM."""
    needed = num_ranks * (each + HOST_LIBRARY_BYTES)
    if each and dram_bytes is not None and needed > dram_bytes:
        raise ConfigError(
            f"expert-device=cpu does not fit {where}: {num_ranks} x ({format_bytes(each)} of "
            f"routed experts + {format_bytes(HOST_LIBRARY_BYTES)} for libraries) = "
            f"{format_bytes(needed)} of DRAM, and there are {format_bytes(dram_bytes)}; use an "
            "INT4 checkpoint, fewer engines (--colocated), or more GPUs without --expert-device"
        )


_INT4_IGNORED = (r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*")
"""Kimi-K2-Thinking's: only routed experts are INT4."""


def rank_rows(rank: RankMemory, layout: KvLayout) -> list[tuple[str, ...]]:
    """Return one row a rank for a table: rank, weights, KV, its tokens, activations,
    communication, libraries, all together, of what, and experts in DRAM where there are.
    """
    shape = rank.shape
    tokens = max(0, rank.num_pages) * layout.block_tokens
    share = f"{tokens}" if shape.dcp == 1 else f"{tokens} of {tokens * shape.dcp}"
    cells = (
        format_bytes(rank.weights),
        format_bytes(rank.kv),
        share,
        format_bytes(rank.activations),
        format_bytes(rank.communication),
        format_bytes(rank.libraries),
        format_bytes(rank.total),
        "" if rank.gpu_bytes is None else format_bytes(rank.gpu_bytes),
        *((format_bytes(rank.dram),) if rank.dram else ()),
    )
    return [(str(number), *cells) for number in range(shape.tp)]
