"""Compiles kernels for a GPU that this machine need not have.

`noted` collects what launches would compile, once each, and runs nothing; `compile_into` compiles
it. Triton finds compiled code by a digest of its own files, the kernel's source, the types, widths
and alignments of a launch, and the target, but not of paths or of the machine. So a launch on a GPU
finds what was compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mooncake_kernels.triton import shipped
from mooncake_kernels.triton.device import Gpu, stand_for

GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, 90),
    "h200": Gpu("NVIDIA H200", 132, 90),
    "h800": Gpu("NVIDIA H800", 132, 90),
}
"""The SXM forms."""


class StandInDriver:
    """Stands for the driver of a machine with a GPU of this capability: names the target, no
    more.
    """

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_device_interface(self) -> Any:
        raise RuntimeError("there is no device")


@dataclass(frozen=True)
class Variant:
    """A kernel for certain types, widths and alignments, which is compiled once."""

    kernel: Any
    """The function, as Triton holds it."""
    description: str
    """What Triton can compile it by again."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@contextmanager
def noted(gpu: Gpu) -> Iterator[list[Variant]]:
    """Yield a list to which every launch inside adds what it would compile for `gpu`, once. Tensors
    may be those of the meta device, which have addresses within their storage. Nothing runs. No
    other thread may launch, and nothing may be launched on a GPU afterwards.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: unset it, so that kernels are compiled")
    found: set[tuple[int, str]] = set()
    variants: list[Variant] = []

    def note(**told: Any) -> bool:
        """Triton calls this before it compiles. True: it neither compiles nor launches."""
        kernel = told["fn"].jit_function
        if (place := (id(kernel), told["key"])) not in found:
            found.add(place)
            variants.append(Variant(kernel, told["compile"]["specialization_data"]))
        return True

    driver.set_active(StandInDriver(gpu.arch))
    stand_for(gpu)
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        try:
            yield variants
        finally:
            stand_for(None)


def compile_into(
    folder: Path, variants: Sequence[Variant], gpu: Gpu, progress: Callable[[int, int], None]
) -> Path:
    """Compile what is not in `folder` yet. Return the folder within it that keeps what belongs to
    this Triton, this torch, these sources and the capability of `gpu`. `progress` is called with
    (done, all).
    """
    own = folder / shipped.name_of(gpu.arch)
    own.mkdir(parents=True, exist_ok=True)
    driver.set_active(StandInDriver(gpu.arch))
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(own)
        knobs.compilation.store_binary_only = True
        for done, each in enumerate(variants):
            progress(done, len(variants))
            each.kernel.preload(each.description)
        progress(len(variants), len(variants))
    return own
