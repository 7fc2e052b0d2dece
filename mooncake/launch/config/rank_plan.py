"""Computes the memory of each rank of an instance from the model's shape alone, and says what would
fit if it does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from mooncake.base import ConfigError, KvLayout, ModelSpec, Shape, format_bytes
from mooncake.base.models.parallel import (
    DP_FLAG,
    EXPERTS_FLAG,
    PP_FLAG,
    TP_FLAG,
    divisors,
    stage_layers,
)
from mooncake.model.checkpoint.quant_format import INT4_GROUP, Int4Group, QuantFormat
from mooncake.model.checkpoint.tensor_cuts import cuts, said_of_cuts
from mooncake.model.memory import (
    GpuMemory,
    communication_bytes,
    held_weights,
    num_communicators,
    room_for_pages,
    workspace_bytes,
)
from mooncake.model.options import ModelOptions

HOST_LIBRARY_BYTES = 400 * 2**20
"""Bytes of an engine's process: interpreter, tensor library."""
GPU_LIBRARY_BYTES = 2**30
"""Bytes on a GPU for the CUDA context and loaded kernels. Assumed, not measured."""
GPU_COMMUNICATOR_BYTES = 2**28
"""Bytes on a GPU for the channels of one NCCL communicator. Assumed, not measured."""
STEP_TOKENS = 8192, 4096, 2048
"""Tokens of a step to choose from if none are given. The more rows an expert gets, the fuller are
the tiles of 128 on a GPU. The CPU takes the last one.
"""
_MOST_STAGES = 8
"""Largest number of stages in the advice for a shape that would fit."""
_LEAST_CONTEXT = 1024
"""The advice never names a --max-model-len below this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What the memory of a rank depends on besides the shape."""

    spec: ModelSpec
    dtype: str
    quantization: QuantFormat | None
    """The checkpoint's format."""
    options: ModelOptions
    elsewhere: bool
    """True if the plan is for other machines than this one."""
    layout: KvLayout
    step_tokens: int
    step_sequences: int
    max_model_len: int
    draft_bytes: int = 0
    """Bytes of a head that makes drafts, besides the model; the last stage has it."""

    @property
    def on_gpu(self) -> bool:
        return self.options.device != "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank, in bytes. All ranks of a stage hold the same."""

    layers: range
    weights: int
    """Bytes where the rank computes. Routed experts in DRAM beside a GPU count as `dram`."""
    dram: int
    activations: int
    """Bytes of the largest step."""
    communication: int
    libraries: int
    num_pages: int
    """KV pages of this rank. Below 0, even the rest does not fit."""
    block_bytes: int
    """Bytes of one page with this rank's layers."""
    gpu_bytes: int | None = None
    """Bytes that a GPU's memory and its utilization leave to a rank. None: not known here, or no
    GPU.
    """

    @property
    def kv(self) -> int:
        return max(0, self.num_pages) * self.block_bytes

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.overhead

    @property
    def overhead(self) -> int:
        """Memory that holds neither weights nor pages."""
        return self.activations + self.communication + self.libraries


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceMemory:
    shape: Shape
    stages: tuple[RankMemory, ...]
    """One rank of each stage, first stage first. All have as many pages."""
    only_experts: bool = False
    """True of a worker that holds the routed experts of instances of `shape`, and nothing else."""

    @property
    def num_pages(self) -> int:
        """KV pages of each rank. Below 0, even the rest does not fit."""
        return self.stages[0].num_pages

    def sum(self, of_rank: Callable[[RankMemory], int]) -> int:
        """Return the sum over all ranks of the bytes that `of_rank` returns."""
        return self.shape.tp * sum(of_rank(rank) for rank in self.stages)


def instance_memory(
    needs: RankNeeds, shape: Shape, num_pages: int, *, only_experts: bool = False
) -> InstanceMemory:
    """Return the memory of the ranks of an instance that has `num_pages` pages, or of a worker that
    holds only the routed experts of such an instance.

    With `dcp` each rank holds its share of the pages, otherwise all of them.
    """
    stages = stage_layers(needs.spec.num_hidden_layers, shape.pp)
    ranks = tuple(
        _rank_memory(needs, shape, stage, layers, num_pages, only_experts)
        for stage, layers in enumerate(stages)
    )
    return InstanceMemory(shape=shape, stages=ranks, only_experts=only_experts)


def _rank_memory(
    needs: RankNeeds,
    shape: Shape,
    stage: int,
    layers: range,
    num_pages: int,
    only_experts: bool,
) -> RankMemory:
    libraries = GPU_LIBRARY_BYTES if needs.on_gpu else HOST_LIBRARY_BYTES
    communication = communication_bytes(
        needs.spec,
        needs.dtype,
        shape,
        step_tokens=needs.step_tokens,
        step_sequences=needs.step_sequences,
        max_model_len=needs.max_model_len,
    )
    if needs.on_gpu:
        communication += GPU_COMMUNICATOR_BYTES * num_communicators(shape, stage)
    held = held_weights(
        needs.spec,
        needs.dtype,
        needs.options,
        needs.quantization,
        shape=shape,
        layers=layers,
        elsewhere=needs.elsewhere,
        only_experts=only_experts,
    )
    num_kv_layers, draft_bytes = len(layers), 0
    if stage == shape.pp - 1 and not only_experts:
        # An MTP layer has KV behind that of the model's layers.
        num_kv_layers, draft_bytes = needs.layout.num_layers - layers.start, needs.draft_bytes
    return RankMemory(
        layers=layers,
        weights=held.on_device + draft_bytes,
        dram=held.in_dram,
        activations=workspace_bytes(
            needs.spec,
            needs.dtype,
            step_tokens=needs.step_tokens,
            step_sequences=0 if only_experts else needs.step_sequences,
            num_ranks=shape.tp,
        ),
        communication=communication,
        libraries=libraries,
        num_pages=math.ceil(num_pages / shape.dcp),
        block_bytes=needs.layout.slice_bytes * num_kv_layers,
    )


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """The largest number of tokens in a step, and the reason for it."""

    number: int
    why: str


def step_tokens(
    given: int | None, node: GpuNode | None, needs: RankNeeds, shapes: Iterable[Shape], pages: int
) -> StepTokens:
    """Return the `given` number. If none is given, return on a GPU the largest number with which
    engines of all `shapes` still have room for `pages` of KV.

    node: the GPUs; None: their memory is not known.
    """
    least = STEP_TOKENS[-1]
    if given is not None:
        return StepTokens(given, "as asked for")
    if not needs.on_gpu:
        return StepTokens(least, "the default on a CPU")
    if node is None:
        return StepTokens(least, "the memory of the GPUs is not known before the start")
    kv = f"{pages * needs.layout.block_tokens} tokens of KV on {node.name}"
    for number in STEP_TOKENS:
        larger = dataclasses.replace(needs, step_tokens=number)
        if all(node.has_room(larger, shape, pages) for shape in shapes):
            most = "" if number == STEP_TOKENS[0] else ", and more would not"
            return StepTokens(number, f"leaves room for {kv}{most}")
    return StepTokens(least, f"the least; even that leaves no room for {kv}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuNode:
    """The GPUs that a plan is for: `num_gpus` of `gpu_bytes` each, of which the share `utilization`
    is used.
    """

    name: str
    num_gpus: int
    gpu_bytes: int
    utilization: float
    dram_bytes: int | None
    """DRAM of a node; None: not known."""

    def filled(self, needs: RankNeeds, shape: Shape) -> InstanceMemory:
        """Return the memory of ranks with as many pages as every GPU has room for."""
        ranks = [self._filled(rank) for rank in instance_memory(needs, shape, 0).stages]
        num_pages = min(rank.num_pages for rank in ranks)
        return InstanceMemory(
            shape=shape,
            stages=tuple(dataclasses.replace(rank, num_pages=num_pages) for rank in ranks),
        )

    def with_experts(self, needs: RankNeeds, shape: Shape) -> InstanceMemory:
        """Return the memory of a worker that holds only routed experts. Below 0 pages, they do not
        fit.
        """
        memory = instance_memory(needs, shape, 0, only_experts=True)
        ranks = [self._filled(rank) for rank in memory.stages]
        none = [dataclasses.replace(each, num_pages=min(0, each.num_pages)) for each in ranks]
        return dataclasses.replace(memory, stages=tuple(none))

    def _filled(self, rank: RankMemory) -> RankMemory:
        resident = rank.weights + rank.communication + rank.libraries
        memory = GpuMemory(self.gpu_bytes, resident, rank.activations)
        return dataclasses.replace(
            rank,
            # Captured decode steps keep a workspace of their own, as large as the largest step's.
            activations=2 * rank.activations,
            num_pages=room_for_pages(memory, self.utilization, rank.block_bytes),
            gpu_bytes=int(self.gpu_bytes * self.utilization),
        )

    def has_room(self, needs: RankNeeds, shape: Shape, num_pages: int) -> bool:
        """Return whether `num_pages` KV pages fit beside weights and the largest step."""
        return self.filled(needs, shape).num_pages * shape.dcp >= num_pages

    def check_ranks(self, needs: RankNeeds, shape: Shape) -> None:
        """Raise ConfigError if a stage has more ranks than there are GPUs. The message says what
        would fit.
        """
        if shape.tp > self.num_gpus:
            cures = self._cures(needs, Shape(pp=shape.pp), 0)
            raise ConfigError(f"{_too_many(shape, self.num_gpus)}; {cures}")

    def check(self, needs: RankNeeds, memory: InstanceMemory, num_engines: int) -> None:
        """Raise ConfigError if the pages, or a sequence of full length, do not fit, or if the
        experts do not fit into DRAM. The message says what takes the room and what would fit.
        """
        shape = memory.shape
        on_a_node = min(num_engines * shape.pp, self.num_gpus // shape.tp) * shape.tp
        most = max(rank.dram for rank in memory.stages)
        check_dram(on_a_node, most, self.dram_bytes, f"on {self.name}")
        if memory.only_experts:
            if memory.num_pages < 0:
                raise ConfigError(
                    f"{shape} on {self.name} does not fit: a worker holds "
                    f"{format_bytes(memory.stages[0].weights)} of routed experts and "
                    f"{format_bytes(memory.stages[0].overhead)} for steps, communication and "
                    f"libraries, of {format_bytes(int(self.gpu_bytes * self.utilization))}; raise "
                    f"--{EXPERTS_FLAG}"
                )
            return
        filled = self.filled(needs, shape)
        each = shape.dcp * needs.layout.block_tokens
        tokens = max(0, filled.num_pages) * each
        wanted = max(needs.max_model_len, memory.num_pages * each)
        if wanted <= tokens:
            return
        usable = int(self.gpu_bytes * self.utilization)
        fullest = max(filled.stages, key=lambda rank: rank.weights)
        raise ConfigError(
            f"{shape} on {self.name} does not fit: each rank holds "
            f"{format_bytes(fullest.weights)} of weights and {format_bytes(fullest.overhead)} for "
            f"steps, communication and libraries, of {format_bytes(usable)} ({self.utilization:g} "
            f"of a GPU): that leaves room for {tokens} tokens of KV, and {wanted} are wanted; "
            f"{self._cures(needs, shape, tokens)}"
        )

    def _cures(self, needs: RankNeeds, present: Shape, tokens: int) -> str:
        cures = []
        fitting = self._fitting_shape(needs, present)
        if fitting is not None:
            cures.append(fitting.flags)
        if tokens >= _LEAST_CONTEXT:
            cures.append(f"--max-model-len {tokens}")
        if not isinstance(needs.quantization, Int4Group):
            int4 = dataclasses.replace(needs, quantization=Int4Group(INT4_GROUP, _INT4_IGNORED))
            shape = self._fitting_shape(int4, present)
            if shape is not None:
                cures.append(f"INT4 weights as {shape}")
        if not cures:
            return f"no shape of this model fits nodes of {self.num_gpus} such GPUs"
        return "this would: " + ", or ".join(cures)

    def _fitting_shape(self, needs: RankNeeds, present: Shape) -> Shape | None:
        """Return the smallest shape, no smaller than `present`, that fits. It uses as few stages as
        possible, one node for each, and as few GPUs in each. Shared experts are shared among as
        many ranks.
        """
        ep = present.ep
        able = cuts(needs.spec, needs.quantization, self.num_gpus, whole_experts=ep > 1)
        sizes = [tp for tp in able if tp >= present.tp and not (ep > 1 and ep % tp)]
        for pp in range(present.pp, min(_MOST_STAGES, needs.spec.num_hidden_layers) + 1):
            for tp in sizes if pp == present.pp else sizes[-1:]:
                least = msgspec.structs.replace(_sharing(tp, ep), pp=pp)
                filled = self.filled(needs, least)
                for dcp in divisors(tp):
                    shape = msgspec.structs.replace(least, dcp=dcp)
                    exact = filled if dcp == 1 else self.filled(needs, shape)
                    tokens = exact.num_pages * dcp * needs.layout.block_tokens
                    if tokens >= needs.max_model_len:
                        return shape
                    if filled.num_pages <= 0:
                        break  # weights alone do not fit: dealing KV out does not help
        return None


def check_gpus(
    spec: ModelSpec, quantization: QuantFormat | None, shape: Shape, num_gpus: int
) -> None:
    """Raise ConfigError if a stage has more ranks than this machine has GPUs. The message says how
    many are possible.
    """
    if shape.tp > num_gpus:
        able = said_of_cuts(cuts(spec, quantization, num_gpus))
        raise ConfigError(f"{_too_many(shape, num_gpus)}; here {able}")


def check_one_machine(engines: Sequence[Shape], num_gpus: int, *, sized: bool) -> None:
    """Raise ConfigError if a machine's GPUs do not take the ranks of all these engines, of which
    those that share experts count each. Engines of one rank, with pages of a given size (`sized`),
    may share a GPU.
    """
    num_ranks = sum(shape.num_ranks for shape in engines)
    of_engines = all(shape.num_ranks == shape.num_sharers == 1 for shape in engines)
    if num_ranks <= max(1, num_gpus):
        return
    if not num_gpus:
        raise ConfigError("device=cuda: this machine shows no NVIDIA GPU; use --device cpu")
    if of_engines and sized:
        return
    for shape in engines:
        together = shape.num_ranks * shape.num_sharers
        if together <= num_gpus:
            continue
        flag, what = f"{PP_FLAG}={shape.pp}", "without stage-hosts stages are on one machine"
        if shape.dp > 1:
            flag, what = f"{DP_FLAG}={shape.dp}", "engines that share experts are on one machine"
        raise ConfigError(
            f"{flag}: {what} so far, and the {together} ranks of {shape} are more than its "
            f"{num_gpus} GPUs; this is only planned (--dry-run)"
        )
    raise ConfigError(
        f"device=cuda: {num_ranks} {'engines' if of_engines else 'ranks'} and {num_gpus} GPU: each "
        "takes all its memory. Engines that share one need pages of a given size: "
        "--kv-cache-memory-bytes or --num-gpu-blocks-override; else use fewer, --colocated, "
        "or --device cpu, or start each machine's engines there (`mooncake up`)"
    )


def _too_many(shape: Shape, num_gpus: int) -> str:
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return f"{TP_FLAG}: {shape.tp} ranks of a stage lie on one node, which has {gpus}"


def _sharing(tp: int, ep: int) -> Shape:
    """Return the shape of `tp` ranks in which `ep` ranks in all share the experts."""
    return Shape(tp=tp, dp=ep // tp, ep=ep) if ep > 1 else Shape(tp=tp)


def check_dram(num_ranks: int, each: int, dram_bytes: int | None, where: str) -> None:
    """Raise ConfigError if the routed experts of `num_ranks` ranks do not fit into DRAM."""
    needed = num_ranks * (each + HOST_LIBRARY_BYTES)
    if each and dram_bytes is not None and needed > dram_bytes:
        raise ConfigError(
            f"expert-device=cpu does not fit {where}: {num_ranks} x ({format_bytes(each)} of "
            f"routed experts + {format_bytes(HOST_LIBRARY_BYTES)} for libraries) = "
            f"{format_bytes(needed)} of DRAM, and there are {format_bytes(dram_bytes)}; use an "
            "INT4 checkpoint, fewer engines (--colocated), or more GPUs without --expert-device"
        )


_INT4_IGNORED = (r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*")
"""The layers that Kimi-K2-Thinking leaves out: only routed experts are INT4."""


def rank_rows(memory: InstanceMemory, layout: KvLayout) -> list[tuple[str, ...]]:
    """Return one row for each rank, for a table: rank, its layers if there are stages, weights, KV,
    its tokens, activations, communication, libraries, the sum, the total available, and experts in
    DRAM if there are any.
    """
    shape = memory.shape
    tokens = max(0, memory.num_pages) * layout.block_tokens
    share = f"{tokens}" if shape.dcp == 1 else f"{tokens} of {tokens * shape.dcp}"
    rows = []
    for stage, rank in enumerate(memory.stages):
        cells = (
            *((f"{rank.layers[0]}-{rank.layers[-1]}",) if shape.pp > 1 else ()),
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
        rows += [(str(number), *cells) for number in shape.ranks_of(stage)]
    return rows
