"""Compiles every kernel that is launched for an H200, on a machine without a GPU; runs none.

Triton's own compiler and ptxas need no GPU. A stand-in driver names the target, launches are turned
into compilations, and what ptxas says of registers and shared memory is kept. To be used in a
process of its own with TRITON_INTERPRET unset.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

HOPPER_SHARED_BYTES = 232448


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its name, shared memory in bytes, warps, and its PTX."""

    name: str
    shared_bytes: int
    num_warps: int
    ptx: str
    cubin: bytes

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx


class HopperDriver:
    """Stands for the driver of a machine with a Hopper GPU: names the target and no more."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        raise RuntimeError("there is no device")


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Yield a list to which every launch inside adds what it compiled."""
    assert not triton.knobs.runtime.interpret
    compiled: list[Compiled] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        meta = kernel.metadata
        compiled.append(
            Compiled(meta.name, meta.shared, meta.num_warps, kernel.asm["ptx"], kernel.asm["cubin"])
        )
        return kernel

    driver.set_active(HopperDriver())
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
