"""The gate of a dense or shared layer in one launch (contract: `reference.experts.gated`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import narrow, pow2

_COLUMNS = 1024


@triton.jit
def _gated(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < inner
    gate = tl.load(gate_up + row * 2 * inner + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + i, mask=there, other=0.0).to(tl.float32)
    # It rounds where the separate operations round.
    silu = narrow(gate / (1.0 + tl.exp(-gate)), gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + i, narrow(silu * up, out.dtype.element_ty), mask=there)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `gate_up` [rows, 2 * inner], contiguous, as [rows, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_COLUMNS, pow2(inner))
        _gated[(rows, triton.cdiv(inner, block))](gate_up, out, inner, BLOCK=block, num_warps=4)
    return out
