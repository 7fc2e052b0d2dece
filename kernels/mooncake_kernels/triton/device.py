"""What all kernels here need to know of the machine: interpreter or GPU, how many programs fill it.

The interpreter computes bfloat16 on raw bit patterns (any sum or product of it is wrong) and rounds
towards zero when it narrows. So `dot` widens to float32 before the product and `narrow` rounds by
hand when `INTERPRETED`; compiled, both are plain. Everything else is done in float32 anyway.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_INTERPRETED_PROGRAMS = 4


@triton.jit
def dot(a, b, acc):
    """Return `a @ b + acc` with acc in float32; float32 inputs are multiplied exactly, not TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # noqa: RET505 - only one branch is compiled, and Triton needs the `else` to see it
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Return float32 `x` rounded to nearest, ties to even, as `DTYPE`."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:  # what the interpreter cuts off is made zero by rounding first
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


def available() -> bool:
    """Return whether kernels can run: on a GPU, or in the interpreter."""
    return bool(INTERPRETED.value) or torch.cuda.is_available()


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_programs(device: torch.device) -> int:
    """Return how many one-per-multiprocessor programs fill `device`."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _multiprocessors(device.index or 0)


def pow2(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())
