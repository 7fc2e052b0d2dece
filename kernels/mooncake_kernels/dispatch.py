"""Which implementations an op has: a table of names. Modules are loaded when first requested.

Every op has a `reference` in plain torch, the definition against which faster backends are tested.
"""

from __future__ import annotations

import importlib
from typing import Any

REFERENCE = "reference"
TRITON = "triton"
NATIVE = "native"
ONEDNN = "onednn"
FIXED = "fixed"
WIDE = "wide"

_TABLE: dict[str, dict[str, str]] = {
    "rms_norm": {
        REFERENCE: "mooncake_kernels.reference.norm:rms_norm",
        NATIVE: "mooncake_kernels.native.glue:rms_norm",
        TRITON: "mooncake_kernels.triton.norm:rms_norm",
    },
    "absorb_queries": {
        REFERENCE: "mooncake_kernels.reference.queries:absorb_queries",
        TRITON: "mooncake_kernels.triton.queries:absorb_queries",
    },
    "add_rms_norm": {
        REFERENCE: "mooncake_kernels.reference.fused_norm:add_rms_norm",
        TRITON: "mooncake_kernels.triton.norm:add_rms_norm",
    },
    "gated": {
        REFERENCE: "mooncake_kernels.reference.experts:gated",
        FIXED: "mooncake_kernels.native.fixed:gated",
        TRITON: "mooncake_kernels.triton.gated:gated",
    },
    "rotate": {
        REFERENCE: "mooncake_kernels.reference.rope:rotate",
        TRITON: "mooncake_kernels.triton.rope:rotate",
    },
    "kv_write": {
        REFERENCE: "mooncake_kernels.reference.kv_write:kv_write",
        NATIVE: "mooncake_kernels.native.glue:kv_write",
        TRITON: "mooncake_kernels.triton.kv_write:kv_write",
    },
    "query_and_kv": {
        REFERENCE: "mooncake_kernels.reference.kv_write:query_and_kv",
        TRITON: "mooncake_kernels.triton.kv_write:query_and_kv",
    },
    "merge_attention": {
        REFERENCE: "mooncake_kernels.reference.merge:merge_attention",
        TRITON: "mooncake_kernels.triton.merge:merge_attention",
    },
    "linear": {
        REFERENCE: "mooncake_kernels.reference.linear:linear",
        FIXED: "mooncake_kernels.native.fixed:linear",
        TRITON: "mooncake_kernels.triton.linear:linear",
    },
    "linear_heads": {
        REFERENCE: "mooncake_kernels.reference.linear:linear_heads",
        WIDE: "mooncake_kernels.wide:linear_heads",
        FIXED: "mooncake_kernels.native.fixed:linear_heads",
        NATIVE: "mooncake_kernels.onednn.mla:linear_heads",
        ONEDNN: "mooncake_kernels.onednn.mla:linear_heads",
        TRITON: "mooncake_kernels.triton.linear:linear_heads",
    },
    "linear_fp8": {
        REFERENCE: "mooncake_kernels.reference.fp8:linear_fp8",
        TRITON: "mooncake_kernels.triton.linear_fp8:linear_fp8",
    },
    "route": {
        REFERENCE: "mooncake_kernels.reference.router:route",
        NATIVE: "mooncake_kernels.native.glue:route",
        TRITON: "mooncake_kernels.triton.router:route",
    },
    "choose": {
        REFERENCE: "mooncake_kernels.reference.router:choose",
        FIXED: "mooncake_kernels.native.fixed:choose",
        TRITON: "mooncake_kernels.triton.router:choose",
    },
    "experts": {
        REFERENCE: "mooncake_kernels.reference.experts:StackedExperts",
        FIXED: "mooncake_kernels.native.fixed:StackedExperts",
        NATIVE: "mooncake_kernels.native.experts:PackedBf16Experts",
        ONEDNN: "mooncake_kernels.onednn.experts:PackedExperts",
        TRITON: "mooncake_kernels.triton.experts:StackedExperts",
    },
    "experts_fp8": {
        REFERENCE: "mooncake_kernels.reference.experts_quantized:Fp8Experts",
        NATIVE: "mooncake_kernels.native.experts:Fp8Experts",
        TRITON: "mooncake_kernels.triton.experts:Fp8Experts",
    },
    "experts_int4": {
        REFERENCE: "mooncake_kernels.reference.experts_quantized:Int4Experts",
        NATIVE: "mooncake_kernels.native.experts:Int4Experts",
        TRITON: "mooncake_kernels.triton.experts:Int4Experts",
    },
    "draw": {
        REFERENCE: "mooncake_kernels.reference.sampling:draw",
        NATIVE: "mooncake_kernels.native.sampling:draw",
        TRITON: "mooncake_kernels.triton.sampling:draw",
    },
    "penalize": {
        REFERENCE: "mooncake_kernels.reference.sampling:penalize",
        NATIVE: "mooncake_kernels.native.sampling:penalize",
        TRITON: "mooncake_kernels.triton.sampling:penalize",
    },
    "mask": {
        REFERENCE: "mooncake_kernels.reference.sampling:mask",
        NATIVE: "mooncake_kernels.native.sampling:mask",
    },
    "most_likely": {
        REFERENCE: "mooncake_kernels.reference.sampling:most_likely",
        NATIVE: "mooncake_kernels.native.sampling:most_likely",
    },
    "quantize_rows": {
        REFERENCE: "mooncake_kernels.reference.fp8:quantize_rows",
        TRITON: "mooncake_kernels.triton.quantize:quantize_rows",
    },
    "mla_absorbed": {
        REFERENCE: "mooncake_kernels.reference.mla:mla_absorbed",
        WIDE: "mooncake_kernels.wide:mla_absorbed",
        FIXED: "mooncake_kernels.native.fixed:mla_absorbed",
        NATIVE: "mooncake_kernels.onednn.mla:mla_absorbed",
        ONEDNN: "mooncake_kernels.onednn.mla:mla_absorbed",
        TRITON: "mooncake_kernels.triton.mla:mla_absorbed",
    },
    "mla_decode": {
        REFERENCE: "mooncake_kernels.reference.mla_decode:mla_decode",
        NATIVE: "mooncake_kernels.native.mla_decode:mla_decode",
        TRITON: "mooncake_kernels.triton.mla_decode:mla_decode",
    },
    "mla_expanded": {
        REFERENCE: "mooncake_kernels.reference.mla:mla_expanded",
        WIDE: "mooncake_kernels.wide:mla_expanded",
        NATIVE: "mooncake_kernels.native.mla_prefill:mla_expanded",
        ONEDNN: "mooncake_kernels.onednn.mla:mla_expanded",
        TRITON: "mooncake_kernels.triton.mla:mla_expanded",
    },
    "mla_prefill": {
        REFERENCE: "mooncake_kernels.reference.mla_prefill:mla_prefill",
        TRITON: "mooncake_kernels.triton.mla_prefill:mla_prefill",
    },
}


def ops() -> list[str]:
    """Return the names of all ops, sorted."""
    return sorted(_TABLE)


def backends(op: str) -> list[str]:
    """Return the backends of `op`, the reference first. Raises KeyError when there is no
    such op.
    """
    return sorted(_TABLE[op], key=lambda name: (name != REFERENCE, name))


def kernel(op: str, backend: str = REFERENCE) -> Any:
    """Return the callable of `op` in `backend`. All backends of an op share one contract.

    Raises:
        KeyError: there is no such op, or it has no such backend.
        ImportError: the backend's own dependency (Triton, for example) is not installed.
    """
    target = _TABLE[op].get(backend)
    if target is None:
        raise KeyError(f"op {op!r} has no backend {backend!r}, only {', '.join(backends(op))}")
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
