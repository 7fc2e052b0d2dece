"""Which implementations an op has. A table of names; modules are loaded when first asked for.

Every op has a `reference` in plain torch: the definition that faster backends are tested against.
"""

from __future__ import annotations

import importlib
from typing import Any

REFERENCE = "reference"
TRITON = "triton"

_TABLE: dict[str, dict[str, str]] = {
    "rms_norm": {REFERENCE: "mooncake_kernels.reference.norm:rms_norm"},
    "rotate": {REFERENCE: "mooncake_kernels.reference.rope:rotate"},
    "route": {REFERENCE: "mooncake_kernels.reference.router:route"},
    "experts": {
        REFERENCE: "mooncake_kernels.reference.experts:StackedExperts",
        "onednn": "mooncake_kernels.onednn.experts:PackedExperts",
    },
    "mla_absorbed": {
        REFERENCE: "mooncake_kernels.reference.mla:mla_absorbed",
        TRITON: "mooncake_kernels.triton.mla:mla_absorbed",
    },
    "mla_decode": {
        REFERENCE: "mooncake_kernels.reference.mla_decode:mla_decode",
        TRITON: "mooncake_kernels.triton.mla_decode:mla_decode",
    },
    "mla_expanded": {REFERENCE: "mooncake_kernels.reference.mla:mla_expanded"},
}


def ops() -> list[str]:
    """Return the names of all ops, sorted."""
    return sorted(_TABLE)


def backends(op: str) -> list[str]:
    """Return the backends of `op`, the reference first. KeyError: there is no such op."""
    return sorted(_TABLE[op], key=lambda name: (name != REFERENCE, name))


def kernel(op: str, backend: str = REFERENCE) -> Any:
    """Return the callable of `op` in `backend`; all backends of an op share one contract.

    Raises:
        KeyError: no such op, or it has no such backend.
        ImportError: the backend's own dependency is not installed (Triton, say).
    """
    target = _TABLE[op].get(backend)
    if target is None:
        raise KeyError(f"op {op!r} has no backend {backend!r}, only {', '.join(backends(op))}")
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
