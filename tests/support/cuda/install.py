"""Installs the emulated GPUs in this process, and takes them out again. Where there is a real one,
tests that hold on any GPU use it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mooncake.model.device import cuda_memory
from tests.support.cuda import memory as memories
from tests.support.cuda import streams, tensors
from tests.support.cuda.facade import DriverGpu, names, pinning
from tests.support.cuda.kernels import queued_launches
from tests.support.cuda.mutants import taken_out
from tests.support.cuda.nccl import ProcessGroupNCCL
from tests.support.cuda.streams import LATE, Machine

TORCH = "2.13"
"""The release whose private names this package uses."""
_registered: list[Any] = []


def why_not() -> str | None:
    """Return why no GPU can be emulated here; None: it can."""
    if not torch.__version__.startswith(TORCH + "."):
        return f"the emulated GPU is made for torch {TORCH}, and this is {torch.__version__}"
    if torch.version.cuda is not None:
        return "the emulated GPU needs torch's build for CPUs, and this is one for CUDA"
    if shutil.which("c++") is None:
        return "the emulated GPU needs a C++ compiler: there is no `c++` here"
    return None


class Real:
    """A real GPU in the place of the emulated one. It does not show what raced."""

    def finish(self) -> None:
        """Wait for all that is queued. RuntimeError: a task failed."""
        torch.cuda.synchronize()


class Emulated:
    """The machine that is installed, and its memory."""

    def __init__(self, machine: Machine, memory: memories.Memory) -> None:
        self.machine, self.memory = machine, memory

    def finish(self) -> None:
        """Run all that is queued on all devices. AssertionError: tasks raced; RuntimeError: one
        failed.
        """
        for device in range(self.machine.num_devices):
            self.machine.finish_all(device)
        assert not self.machine.races, "\n\n".join(self.machine.races[:3])


@contextmanager
def one_gpu(order: str = LATE, seed: int = 0) -> Iterator[Real | Emulated]:
    """Have one GPU until the block ends: a real one where there is one, else an emulated one."""
    if torch.cuda.is_available():
        yield Real()
        return
    with emulated(order=order, seed=seed) as made:
        yield made


@contextmanager
def emulated(
    num_devices: int = 1, *, device_bytes: int = 1 << 30, order: str = LATE, seed: int = 0
) -> Iterator[Emulated]:
    """Have `num_devices` GPUs of `device_bytes` each until the block ends. order: in which of the
    orders that CUDA allows tasks run (`streams.ORDERS`).
    """
    guard = _guard()
    machine = Machine(num_devices, order, seed)
    memory = memories.Memory(machine, device_bytes)
    with ExitStack() as stack:
        streams.use(machine)
        memories.use(memory)
        stack.callback(streams.use, None)
        for name, value in names(machine, memory, guard).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for (owner, name), value in pinning(memory).items():
            stack.enter_context(mock.patch.object(owner, name, value))
        gpu = functools.partial(lambda _: DriverGpu(memory))
        stack.enter_context(mock.patch.object(cuda_memory, "Gpu", gpu))
        nccl = mock.patch.object(dist, "ProcessGroupNCCL", ProcessGroupNCCL, create=True)
        stack.enter_context(nccl)
        stack.enter_context(queued_launches())
        stack.enter_context(taken_out())
        yield Emulated(machine, memory)


def _compiled() -> Path:
    """Return the guard's library; built once for a source and a torch."""
    source, folder = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = source.parents[3] / "build" / f"emulated-cuda-{digest}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as there:
            made = Path(there) / "guard.so"
            subprocess.run(
                [
                    "c++", "-shared", "-fPIC", "-std=c++20", "-w", f"-I{folder / 'include'}",
                    str(source), "-o", str(made), f"-L{folder / 'lib'}", "-lc10",
                ],
                check=True,
            )  # fmt: skip
            made.replace(library)
    return library


@functools.cache
def _guard() -> Any:
    """Compile and load what makes "cuda" a device, and register how its tensors are made."""
    loaded = ctypes.CDLL(str(_compiled()))
    made = torch.library.Library("aten", "IMPL")
    made.impl("empty.memory_format", _empty, "CUDA")
    made.impl("empty_strided", _empty_strided, "CUDA")
    for name in ("arange", "arange.start", "arange.start_step"):
        made.impl(name, _arange, "CUDA")  # its own way resizes a result that it has made
    made.impl("copy_", _copy, "CUDA")  # `torch.tensor` leaves out what is dispatched to Python
    _registered.append(made)
    return loaded


def _empty(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    return tensors.empty_strided(size, None, dtype, device)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:  # fmt: skip
    return tensors.empty_strided(size, stride, dtype, device)


def _arange(*numbers: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return tensors.of_host(torch.arange(*numbers, dtype=dtype, device="cpu"), device)


def _copy(to: Any, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return tensors.copy(to, source, non_blocking)
