"""Step durations on hardware that is not at hand: a roofline over published figures.

Pure; the figures come from `configs/`, each with its source. An
instance is one model replica on as many nodes as its weights need.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake.base import ConfigError, KvLayout
from mooncake.base.messages import CostSample, Role
from mooncake.engine.plan import StepPlan

KV_SHARE_MIN = 0.1
"""An instance takes as many nodes as leave this share of their HBM to the KVCache."""
HBM_USABLE = 0.9
RUNTIME_BYTES_PER_GPU = 4e9
"""Activations, communication buffers, graphs."""


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routed experts: a batch reads the weights of those experts it touches."""

    num_experts: int
    num_per_token: int
    bytes_total: float

    def bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of the experts that `num_tokens` tokens touch, routed evenly."""
        missed = (1 - self.num_per_token / self.num_experts) ** num_tokens
        return self.bytes_total * (1 - missed)


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model in one precision."""

    name: str
    num_layers: int
    kv_bytes_per_token: int
    flops_per_token: float
    """All matrix products of one token, two operations a weight."""
    flops_per_pair: float
    """Attention of one token to one other, all layers, as computed in prefill."""
    dense_bytes: float
    """Weights that every step reads."""
    precision: str
    """Which of the hardware's peaks its matrix products run at: "bf16" or "fp8"."""
    max_model_len: int
    experts: Experts | None = None
    sources: dict[str, str] = {}
    """Figure -> where it comes from."""

    @property
    def weight_bytes(self) -> float:
        return self.dense_bytes + (self.experts.bytes_total if self.experts else 0.0)

    def bytes_read(self, num_tokens: int) -> float:
        """Return the weight bytes a step with `num_tokens` tokens reads."""
        routed = self.experts.bytes_read(num_tokens) if self.experts is not None else 0.0
        return self.dense_bytes + routed


class HardwareFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node."""

    name: str
    num_gpus: int
    flops: dict[str, float]
    """Of one GPU by precision, dense peak."""
    hbm_bytes: float
    """Of one GPU."""
    hbm_bytes_per_s: float
    """Of one GPU, peak."""
    flops_efficiency: dict[str, float]
    """Share of each peak that prefill reaches."""
    hbm_efficiency: float
    step_overhead_s: float
    """Launches, scheduling and sampling of one step."""
    layer_sync_s: float
    """Communication between GPUs, one layer of one step."""
    dram_bytes_per_s: float
    """Between a node's pool and its GPUs."""
    link_bytes_per_s: float
    """Between nodes, all cards together, as reached."""
    transfer_latency_s: float
    sources: dict[str, str] = {}


class InstanceCost:
    """One instance of a model on hardware: implements `sim.runner.StepCost`."""

    def __init__(self, model: ModelFigures, hardware: HardwareFigures) -> None:
        if model.precision not in hardware.flops:
            raise ConfigError(
                f"{model.name} computes in {model.precision}, which {hardware.name} does not have"
            )
        self.model = model
        self.hardware = hardware
        self.num_nodes = _num_nodes(model, hardware)
        num_gpus = self.num_nodes * hardware.num_gpus

        def reached(precision: str) -> float:
            return num_gpus * hardware.flops[precision] * hardware.flops_efficiency[precision]

        self._hbm = num_gpus * hardware.hbm_bytes_per_s * hardware.hbm_efficiency
        self._token_s = model.flops_per_token / reached(model.precision)
        # Attention runs in bf16 whatever the weights are.
        self._pair_s = model.flops_per_pair / reached("bf16")
        self._context_s = model.kv_bytes_per_token / self._hbm
        self._fixed_s = hardware.step_overhead_s + model.num_layers * hardware.layer_sync_s
        self._weights_s: dict[int, float] = {}

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits into HBM beside the weights."""
        return int(_kv_bytes(self.model, self.hardware, self.num_nodes)) // (
            self.model.kv_bytes_per_token
        )

    @property
    def link_bytes_per_s(self) -> float:
        """Network bandwidth of the whole instance, bytes per second: all cards of all its nodes."""
        return self.num_nodes * self.hardware.link_bytes_per_s

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of a step in seconds."""
        num_tokens = num_pairs = num_context = 0
        for slot in plan.slots:
            new, start = len(slot.tokens), slot.start
            num_tokens += new
            num_pairs += new * start + new * (new + 1) // 2
            num_context += start + new
        return self.step_s(num_tokens, num_pairs, num_context)

    def step_s(self, num_tokens: int, num_pairs: int, num_context: int) -> float:
        """Return the seconds of a step: `num_pairs` (token, attended token) pairs, `num_context`
        tokens whose KV is read.
        """
        weights_s = self._weights_s.get(num_tokens)
        if weights_s is None:
            weights_s = self.model.bytes_read(num_tokens) / self._hbm
            self._weights_s[num_tokens] = weights_s
        products_s = max(num_tokens * self._token_s, weights_s)
        attention_s = max(num_pairs * self._pair_s, num_context * self._context_s)
        return self._fixed_s + products_s + attention_s

    def prefill_s(self, num_tokens: int, num_cached: int, chunk_tokens: int) -> float:
        """Return the seconds to compute a prompt's tokens from `num_cached` on, in chunks."""
        seconds, start = 0.0, num_cached
        while start < num_tokens:
            new = min(chunk_tokens, num_tokens - start)
            seconds += self.step_s(new, new * start + new * (new + 1) // 2, start + new)
            start += new
        return seconds

    def profile(self, role: Role, chunk_tokens: int, max_batch: int) -> list[CostSample]:
        """Return the start-up profile that `mooncake profile` would measure on this instance."""
        if role is Role.PREFILL:
            shapes = [
                (new, start, 1)
                for new in _grid(64, chunk_tokens)
                for start in (0, 4096, 16384, 65536, 131072)
            ]
        else:
            shapes = [
                (batch, batch * context, batch)
                for batch in _grid(1, max_batch)
                for context in (1024, 8192, 32768)
            ]
        return [
            CostSample(new, context, sequences, self._shape_s(new, context, sequences))
            for new, context, sequences in shapes
        ]

    def _shape_s(self, new: int, context: int, sequences: int) -> float:
        each = new / sequences
        pairs = round(each * context + new * (each + 1) / 2)
        return self.step_s(new, pairs, context + new)


def sim_layout(model: ModelFigures, block_tokens: int, num_groups: int) -> KvLayout:
    """Return the layout of simulated blocks: the model's bytes, with the layers in `num_groups`
    groups that are pushed together, so that a layer costs the simulator one event in many.

    Raises:
        ConfigError: the bytes do not divide so.
    """
    width, rest = divmod(model.kv_bytes_per_token, num_groups)
    if rest:
        raise ConfigError(
            f"{model.name}: {model.kv_bytes_per_token} bytes are not {num_groups} groups"
        )
    return KvLayout(
        num_layers=num_groups,
        block_tokens=block_tokens,
        kv_width=width,
        dtype="float8_e4m3fn",  # one byte: the width is in bytes
        fingerprint=f"sim-{model.name}-{block_tokens}",
    )


def _grid(first: int, last: int) -> Sequence[int]:
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def _kv_bytes(model: ModelFigures, hardware: HardwareFigures, num_nodes: int) -> float:
    num_gpus = num_nodes * hardware.num_gpus
    usable = num_gpus * (hardware.hbm_bytes * HBM_USABLE - RUNTIME_BYTES_PER_GPU)
    return usable - model.weight_bytes


def _num_nodes(model: ModelFigures, hardware: HardwareFigures) -> int:
    for num_nodes in range(1, 65):
        total = num_nodes * hardware.num_gpus * hardware.hbm_bytes
        if _kv_bytes(model, hardware, num_nodes) >= KV_SHARE_MIN * total:
            return num_nodes
    raise ConfigError(f"{model.name} does not fit 64 nodes of {hardware.name}")
