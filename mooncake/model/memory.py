"""Memory needed by weights, steps and KV pages, from the spec alone: no torch, no device.

Used by `--dry-run` and at start-up; the numbers are computed, not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.base import DTYPE_BYTES, ConfigError, ModelSpec, format_bytes
from mooncake.model.checkpoint.tensor_shapes import tensor_shapes

_ROUTER_PARTS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


@dataclass(frozen=True)
class ParameterCount:
    """Number of weights; `router` (kept in float32) is part of `total`."""

    total: int
    router: int
    active: int
    """Read for one token: of the routed experts only those a token is sent to."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory measured on a GPU after the weights were loaded."""

    total_bytes: int
    resident_bytes: int
    """In use: weights, libraries, other processes."""
    step_bytes: int
    """What the largest step took on top while it ran."""


def pages_that_fit(
    memory: GpuMemory, *, utilization: float, block_bytes: int, least_pages: int
) -> int:
    """Return how many KV pages are left of `utilization` of the memory, captured steps reserved.

    Captured decode steps keep their own workspace: never larger than the largest step's, so that
    much is kept back a second time.

    Raises:
        ConfigError: fewer than `least_pages` fit; says what takes the room.
    """
    budget = int(memory.total_bytes * utilization)
    pages = (budget - memory.resident_bytes - 2 * memory.step_bytes) // block_bytes
    if pages < least_pages:
        raise ConfigError(
            f"gpu-memory-utilization: {utilization:g} of {format_bytes(memory.total_bytes)} leaves "
            f"room for {max(0, pages)} KV pages beside {format_bytes(memory.resident_bytes)} in "
            f"use and {format_bytes(2 * memory.step_bytes)} for steps; one sequence of full length "
            f"takes {least_pages}; lower --max-model-len or --max-num-batched-tokens"
        )
    return pages


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Return the number of parameters of a model of this shape."""
    total = router = routed = 0
    for name, shape in tensor_shapes(spec).items():
        size = math.prod(shape)
        total += size
        if name.endswith(_ROUTER_PARTS):
            router += size
        if ".mlp.experts." in name:
            routed += size
    idle = routed * (spec.n_routed_experts - spec.num_experts_per_tok) // spec.n_routed_experts
    return ParameterCount(total=total, router=router, active=total - idle)


def weights_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of the loaded weights: all in `dtype`, the routers in float32."""
    count = count_parameters(spec)
    plain = (count.total - count.router) * DTYPE_BYTES[dtype]
    return plain + count.router * DTYPE_BYTES["float32"]


def workspace_bytes(spec: ModelSpec, dtype: str, *, step_tokens: int, step_sequences: int) -> int:
    """Return an upper estimate of what one step of `step_tokens` needs beside weights and KV.

    Counts the widest moments of a layer as if they were alive together, and float32 logits.
    """
    heads = spec.num_attention_heads
    attention = 2 * heads * spec.qk_head_dim + heads * spec.v_head_dim + spec.kv_width
    routed = spec.num_experts_per_tok * (2 * spec.hidden_size + 3 * spec.moe_intermediate_size)
    dense = 3 * spec.intermediate_size
    width = 4 * spec.hidden_size + max(attention, routed, dense)
    activations = step_tokens * width * DTYPE_BYTES[dtype]
    return activations + step_sequences * spec.vocab_size * 2 * DTYPE_BYTES["float32"]
