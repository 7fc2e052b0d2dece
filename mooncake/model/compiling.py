"""Runs the steps of a model whose tensors have shapes and no numbers, on the way that a GPU's
worker takes from its start on, so that it shows which kernels are launched. Nothing is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from mooncake_kernels.dispatch import TRITON

from mooncake.base import ConfigError, KvLayout, ModelSpec, Shape
from mooncake.base.kv_layout import Home
from mooncake.engine.config import EngineConfig
from mooncake.engine.ranks.step_log import Measure
from mooncake.model.backends import Backends, settle
from mooncake.model.checkpoint.eagle3 import Eagle3Files
from mooncake.model.checkpoint.quant import QuantizedWeight
from mooncake.model.checkpoint.quant_format import (
    FP8_BLOCK,
    INT4_GROUP,
    Fp8Block,
    Int4Group,
    QuantFormat,
    is_quantized,
)
from mooncake.model.checkpoint.tensor_cuts import Part
from mooncake.model.checkpoint.weights import SPEC_DTYPES
from mooncake.model.copies import HostCopies
from mooncake.model.device.graphs import Replay
from mooncake.model.drafts.eagle3 import Eagle3Head
from mooncake.model.drafts.layers import draft_layer, layers_read
from mooncake.model.drafts.model_drafts import DraftLayer, ModelDrafts
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler, sampling_ops
from mooncake.model.loading import load_model
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import GpuMemory
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.group import Solo
from mooncake.model.running.computed_step import capture_steps, captured_sizes

META = torch.device("meta")
_SAMPLED_ROWS = 4
"""How many there are decides about no kernel of sampling."""


class ShapesOnly:
    """Weights without numbers, as a checkpoint of this format would give them
    (`loading.WeightSource`).
    """

    def __init__(self, spec: ModelSpec, stored: QuantFormat | None) -> None:
        self.spec = spec
        self._stored = stored

    def check_names(self, expected: Iterable[str]) -> None:
        """All names are there."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Return a tensor in the dtype of what is not quantized."""
        del name
        dtype = SPEC_DTYPES.get(self.spec.dtype, torch.bfloat16)
        return torch.empty(_held(shape, part), dtype=dtype, device=META)

    def quantized(
        self, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> QuantizedWeight | None:
        """Return the weight in its quantized form, if it has one that kernels support."""
        stored = self._stored
        if not is_quantized(stored, name):
            return None
        rows, columns = _held(shape, part)
        if isinstance(stored, Int4Group):
            if stored.group_size != INT4_GROUP or shape[1] % INT4_GROUP:
                return None
            words = torch.empty(rows, columns // 8, dtype=torch.int32, device=META)
            scales = torch.empty(rows, columns // INT4_GROUP, dtype=torch.bfloat16, device=META)
            return QuantizedWeight("int4", words, scales)
        if not isinstance(stored, Fp8Block) or stored.block != (FP8_BLOCK, FP8_BLOCK):
            return None
        values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=META)
        blocks = math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK)
        return QuantizedWeight("fp8", values, torch.empty(blocks, device=META))


def _held(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    return tuple(
        part.size if part is not None and dim == part.dim else size
        for dim, size in enumerate(shape)
    )


class SilentRanks(Solo):
    """The first of several ranks. What the others would send is its own again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as often as there are ranks."""
        return x.repeat(*[1] * (x.dim() - 1), self.size)

    def part(self, size: int) -> SilentRanks:
        """Return a group of `size` ranks."""
        return SilentRanks(size)


class _AtOnce:
    """A side stream whose work is done when it is given."""

    @contextmanager
    def beside(self, work: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        yield work()


class _ToMeta(HostCopies):
    """Copies of shapes."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(META)


class _Once:
    """Captures and measures nothing: it runs each step once."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        step()
        return step

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        step()
        return GpuMemory(0, 0, 0)


def model_without_numbers(
    spec: ModelSpec, stored: QuantFormat | None, dtype: str, options: ModelOptions
) -> tuple[KimiK2, Eagle3Head | None, Backends]:
    """Return a rank's part of a model, with the MTP layer or the head that drafts for it, and what
    computes it on a GPU. It has few layers: those that are alike have the same kernels, and so have
    stages and a whole model. stored: the format of the weights.

    Raises:
        CheckpointError: the head is not complete, or that of another model.
        ConfigError: these settings use other kernels than Triton's, or ranks of several instances
            share the experts.
    """
    shape = options.shape
    if shape.ep > 1 or options.experts_apart:
        raise ConfigError(
            "compile does not know the steps of engines that share experts or keep them in DRAM: "
            "leave out enable-expert-parallel and expert-device=cpu, or let the first start "
            "compile the kernels"
        )
    made = SPEC_DTYPES[dtype]
    backends = dataclasses.replace(
        settle(
            options.attention_backend, options.moe_backend, torch.device("cuda"),
            deterministic=options.deterministic, dtype=made,
        ),
        side=_AtOnce(),
    )  # fmt: skip
    if (backends.attention, backends.moe) != (TRITON, TRITON):
        raise ConfigError(
            "attention-backend, moe-backend: only Triton's kernels are compiled ahead; use auto"
        )
    few = max(1, spec.first_k_dense_replace) + 2  # of experts one in the middle, and the last
    shown = msgspec.structs.replace(spec, num_hidden_layers=min(few, spec.num_hidden_layers))
    model = load_model(
        ShapesOnly(shown, stored), dtype=made, device=META, backends=backends,
        group=SilentRanks(shape.tp) if shape.tp > 1 else None,
        shape=Shape(tp=shape.tp, dcp=shape.dcp),
        with_mtp=options.with_mtp,
    )  # fmt: skip
    head = None
    if options.draft_model is not None:
        head = Eagle3Head(Eagle3Files.open(Path(options.draft_model), spec), model, backends)
    return model, head, backends


def run_steps(
    model: KimiK2,
    head: Eagle3Head | None,
    backends: Backends,
    layout: KvLayout,
    engine: EngineConfig,
    options: ModelOptions,
) -> None:
    """Launch what a rank of an engine with these limits launches until it serves, which is all that
    its requests launch (see `measuring`).
    """
    homes, sequences = engine.num_homes, engine.max_num_seqs
    drafted = 0 if engine.speculation is None else sequences
    asked = Measure(
        layout, homes, engine.max_batched_tokens, sequences, engine.max_model_len, drafted,
        layers_read(model, None, 0),  # a head reads layers that this model may not have
    )  # fmt: skip

    def drafting(kv: KvTensors) -> DraftLayer | None:
        return draft_layer(model, head, kv, drafted, _ToMeta())

    def drafts(kv: KvTensors) -> ModelDrafts | None:
        layer = drafting(kv)
        return None if layer is None else ModelDrafts(layer, _ToMeta())

    measure_memory(model, _Once(), asked, open_drafts=drafts)
    vocab = model.spec.vocab_size
    with torch.inference_mode():
        kv = KvTensors.allocate(layout, 1, META, Home(0, homes))
        layer = drafting(kv)
        reads = () if layer is None else layer.reads
        sizes = captured_sizes(model, backends, options, engine, reads)
        if sizes.most_rows:
            capture_steps(model, kv, _Once(), sizes, _ToMeta(), layer, reads)
        sampler = Sampler(vocab, ops=sampling_ops(backends))
        sampler.try_out(torch.zeros(_SAMPLED_ROWS, vocab))
