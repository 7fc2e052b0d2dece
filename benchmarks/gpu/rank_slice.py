"""One of eight ranks' share of all 61 layers with random INT4 weights, cut by the loader that
serves: the decode step as served, and a group whose other ranks are silent. The step is the
engine's own captured one (`model.graphs`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from mooncake_kernels.dispatch import TRITON

from benchmarks.gpu.attention import decode
from benchmarks.gpu.work import Bench, Case, Work
from mooncake.base import KvLayout, ModelSpec
from mooncake.engine.plan import StepSlot
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.quant import QuantizedWeight
from mooncake.model.checkpoint.tensor_cuts import Part, cut_of, part_shape, tensor_shapes
from mooncake.model.compiling import SilentRanks
from mooncake.model.device.cuda import CudaSide
from mooncake.model.device.graphs import DecodeGraphs, EagerSteps, Replay
from mooncake.model.device.prefill_graphs import PrefillGraphs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.model.running.computed_step import ForwardPass

RANKS = 8
KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "vocab_size": 163840, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0, "attention_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "intermediate_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 2,
    "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip


def whole_spec(tiny: bool) -> ModelSpec:
    """Return the shape of the whole model, of which the loader takes one rank's parts."""
    return ModelSpec.from_config({**KIMI_K2, **(TINY if tiny else {})})


class RandomRank:
    """Weights of a rank, made on the device as they are asked for (`loading.WeightSource`)."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def check_names(self, expected: Iterable[str]) -> None:
        """All names are there."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Return random numbers that keep the size of activations; ones for norms."""
        shape = held(shape, part)
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return out.normal_(std=shape[-1] ** -0.5, generator=self._generator)

    def quantized(
        self, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> QuantizedWeight | None:
        """Return the INT4 form of a routed expert's weight."""
        if ".mlp.experts." not in name:
            return None
        rows, columns = held(shape, part)
        words = torch.randint(
            -(2**31), 2**31, (rows, columns // 8), generator=self._generator,
            device=self._device, dtype=torch.int64,
        ).to(torch.int32)  # fmt: skip
        scales = torch.full((rows, columns // 32), columns**-0.5 / 5, device=self._device)
        return QuantizedWeight("int4", words, scales.bfloat16())


def held(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(
        part.size if part is not None and dim == part.dim else size
        for dim, size in enumerate(shape)
    )


@dataclass(frozen=True)
class SharedContext(Backends):
    """Attention as under DCP8 while `shares` holds 8: all heads over this rank's eighth of every
    context.

    The queries of the other ranks are this one's again, and of the result it keeps its own heads:
    the kernel's work is right, the exchange of queries, outputs and sums is not in it.
    """

    shares: list[int] = field(default_factory=lambda: [1])

    def op(self, name: str) -> Any:
        """Return the op; `mla_decode` for the heads of all ranks."""
        made = super().op(name)
        if name != "mla_decode":
            return made

        def gathered(q: torch.Tensor, kv: torch.Tensor, batch: Any, rank: int) -> Any:
            if self.shares[0] == 1:
                return made(q, kv, batch, rank)
            out, sums = made(q.repeat(1, self.shares[0], 1), kv, batch, rank)
            return out[:, : q.shape[1]], sums[:, : q.shape[1]]

        return gathered


class Steps(EagerSteps):
    """Keeps the steps to be captured, by rows, for the timer to capture."""

    def __init__(self) -> None:
        self.by_rows: dict[int, Callable[[], torch.Tensor]] = {}

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Keep `step`; the largest is offered first and all run once."""
        self.by_rows[step().shape[0]] = step
        return step


@functools.lru_cache(maxsize=1)
def _model(device: torch.device, tiny: bool) -> tuple[KimiK2, SharedContext]:
    """Return a rank and what its attention is switched by; 75 GB that two lines share."""
    side = CudaSide(device) if device.type == "cuda" else None
    backends = SharedContext(TRITON, TRITON, side=side)
    source = RandomRank(whole_spec(tiny), device)
    with torch.inference_mode():
        model = load_model(
            source, dtype=torch.bfloat16, device=device, backends=backends, group=SilentRanks(RANKS)
        )
    return model, backends


def slice_step(bench: Bench, *, batch: int, context: int, dcp: bool) -> Work:
    """Return a rank's decode step; under DCP8 its KV is an eighth of `context`."""
    batch, context = (1, 20) if bench.tiny else (batch, context // RANKS if dcp else context)
    model, backends = _model(bench.device, bench.tiny)
    backends.shares[0] = RANKS if dcp else 1
    spec = model.spec
    page = bench.size(64, 16)
    layout = KvLayout.for_model(
        spec, block_tokens=page, dtype="bfloat16", weights_revision="random"
    )
    pages = -(-context // page)
    with torch.inference_mode():
        kv = KvTensors.allocate(layout, batch * pages, bench.device)
        kv.pages.normal_()
        steps = Steps()
        graphs = DecodeGraphs(model, kv, steps, most_sequences=batch, most_pages=pages)
        slots = [
            StepSlot(
                sequence_id=row, start=context - 1, tokens=[7 * row + 1],
                pages=list(range(row * pages, (row + 1) * pages)), sample=True,
            )
            for row in range(batch)
        ]  # fmt: skip
        graphs.logits(slots)
    return _repeated(steps.by_rows[batch], step_bytes(spec, batch, context))


def prompt_step(bench: Bench, *, tokens: int) -> Work:
    """Return a rank's captured step of a prompt, up to its final hidden states."""
    tokens = bench.size(tokens, 4)
    model, backends = _model(bench.device, bench.tiny)
    backends.shares[0] = 1
    page = bench.size(64, 16)
    layout = KvLayout.for_model(
        model.spec, block_tokens=page, dtype="bfloat16", weights_revision="random"
    )
    with torch.inference_mode():
        kv = KvTensors.allocate(layout, 1, bench.device)
        steps = Steps()
        graphs = PrefillGraphs(model, kv, steps, most_tokens=tokens, most_sequences=1, most_pages=1)
        prompt = [7 * row + 1 for row in range(tokens)]
        slot = StepSlot(sequence_id=0, start=0, tokens=prompt, pages=[0], sample=True)
        ForwardPass(model, kv, graphs)([slot], frozenset())
    return _repeated(steps.by_rows[tokens], step_bytes(model.spec, tokens, page, 1))


def _repeated(step: Callable[[], torch.Tensor], num_bytes: int) -> Work:
    """Return a step whose results must be finite, and the same when computed again."""

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return step()

    def off() -> float:
        first, again = run().clone(), run()
        same = bool(torch.isfinite(first).all()) and torch.equal(first, again)
        return 0.0 if same else 1.0

    return Work(
        run=run,
        num_bytes=num_bytes,
        flops=0,
        difference=off,
        gate=0.0,
        note="floor with the expected number of distinct experts",
    )


def step_bytes(spec: ModelSpec, rows: int, context: int, sequences: int | None = None) -> int:
    """Return the bytes a rank's step reads: weights (experts as often as expected), and KV of
    `sequences`, None: as many as rows.
    """
    total = 0.0
    missed = 1 - spec.num_experts_per_tok / spec.n_routed_experts
    for name, shape in tensor_shapes(spec).items():
        size = float(math.prod(part_shape(shape, cut_of(spec, name, RANKS), RANKS)))
        if "embed_tokens" in name:
            continue
        if ".mlp.experts." in name:
            total += size * (0.5 + 2 / 32) * (1 - missed**rows)
        else:
            total += size * 2
    kv = spec.num_hidden_layers * (sequences or rows) * context * spec.kv_width
    return round(total + 2 * kv)


CASES = (
    Case("slice-b1", "rank slice INT4 TP8, 61 layers, B=1 at 4k", "ms", 4.0, 2.8,
         partial(slice_step, batch=1, context=4096, dcp=False)),
    Case("slice-b64-dcp8", "rank slice INT4 TP8, 61 layers, B=64 at 4k, DCP8 shard", "ms", 22, 18,
         partial(slice_step, batch=64, context=4096, dcp=True)),
    Case("slice-prompt-16", "rank slice INT4 TP8, 61 layers, a prompt of 16 tokens, captured", "ms",
         10, 8, partial(prompt_step, tokens=16)),
    Case("mla-decode-dcp8", "attention of that slice: 64 heads, b64 s512", "us", 60, 30,
         partial(decode, heads=64, batch=64, context=512)),
)  # fmt: skip
