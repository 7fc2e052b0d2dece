"""What all kernels here need to know about the machine: interpreter or GPU, and how many programs
fill it.

The interpreter computes bfloat16 on raw bit patterns (any sum or product of it is wrong) and rounds
towards zero when it narrows. So when `INTERPRETED`, `dot` widens to float32 before the product, and
`narrow` rounds explicitly. When compiled, both are plain. Everything else is computed in float32
anyway.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from mooncake_kernels.triton import host_code
from mooncake_kernels.tuning import Target

host_code.use_compiled()

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_INTERPRETED_PROGRAMS = 4


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, as far as it decides which kernels are launched."""

    name: str
    """The device's name as torch gives it, for tuned tables."""
    multiprocessors: int
    arch: int
    """The device's compute capability, 90 for 9.0."""


_stands_for: list[Gpu] = []


def stand_for(gpu: Gpu | None) -> None:
    """Choose kernels for tensors without a device as for those on `gpu`; None: no longer."""
    _stands_for[:] = [] if gpu is None else [gpu]


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
        if tl.bfloat16 == DTYPE:  # what the interpreter cuts off is made zero by rounding first
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = bits.to(tl.float32, bitcast=True)
        elif tl.float8e4nv == DTYPE:  # three bits of mantissa, steps of 2^-9 below 2^-6
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
            shift: tl.constexpr = 24576.0  # 1.5 * 2^14: adding it rounds to steps of 2^-9
            small = (x + shift) - shift
            x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(DTYPE)


def available() -> bool:
    """Return whether kernels can run: on a GPU, or in the interpreter."""
    return bool(INTERPRETED.value) or torch.cuda.is_available()


@functools.cache
def compiles_for_hopper() -> bool:
    """Return whether kernels are compiled for sm_90, whose instructions Gluon's forms are made
    of.
    """
    return not INTERPRETED.value and driver.active.get_current_target().arch == 90


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_programs(device: torch.device) -> int:
    """Return how many one-per-multiprocessor programs fill `device`."""
    if device.type != "cuda":
        return _stands_for[0].multiprocessors if _stands_for else _INTERPRETED_PROGRAMS
    return _multiprocessors(device.index or 0)


@functools.cache
def _target(index: int) -> Target:
    return Target(torch.cuda.get_device_name(index), triton.__version__)


def target(device: torch.device) -> Target | None:
    """Return the key for tuned tables; None in the interpreter."""
    if _stands_for:
        return Target(_stands_for[0].name, triton.__version__)
    return _target(device.index or 0) if device.type == "cuda" else None


def pow2(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and at least `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())
