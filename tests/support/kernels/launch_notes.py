"""What is launched where nothing runs: of each launch its grid, and the variant of the kernel that
Triton would look up in its cache, or compile where it is not there. On any machine, for an H200.

Tensors may be those of the meta device: they count as if they began at a multiple of 16 bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mooncake_kernels.triton import experts, linear_fp8, mla_decode
from mooncake_kernels.triton.ahead import StandInDriver
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks.gpu.predict import MULTIPROCESSORS


@dataclass(frozen=True)
class Launch:
    """One launch; `variant`: what its compiled code is found by, of which each is compiled once;
    `tensors`: argument -> dtype, as Triton writes it, of what lies in memory.
    """

    kernel: str
    grid: tuple[int, ...]
    variant: object
    tensors: Mapping[str, str]


@functools.cache
def _compilable(kernel: Any) -> Any:
    """Return a kernel that the interpreter would run as one that would be compiled."""
    return JITFunction(kernel.fn, **kernel.kwargs)


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Yield a list to which every launch inside is added; no kernel is compiled or runs."""
    launches: list[Launch] = []
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        jitted = _compilable(self) if isinstance(self, InterpretedFunction) else self

        def found(_: Any, variant: object, signature: dict[str, str], *of_code: Any) -> object:
            tensors = {name: kind[1:] for name, kind in signature.items() if kind.startswith("*")}
            launches.append(Launch(jitted.fn.__name__, tuple(grid), variant, tensors))
            return object()

        with mock.patch.object(JITFunction, "_do_compile", found):
            run(jitted, *args, grid=grid, warmup=True, **options)

    with (
        mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}),  # else 3.9 warns
        mock.patch.object(driver, "_active", StandInDriver()),
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(InterpretedFunction, "run", note),
        mock.patch.object(experts, "num_programs", return_value=MULTIPROCESSORS),
        mock.patch.object(linear_fp8, "num_programs", return_value=MULTIPROCESSORS),
        mock.patch.object(mla_decode, "num_programs", return_value=MULTIPROCESSORS),
    ):
        yield launches


def variants(launches: list[Launch]) -> dict[str, set[object]]:
    """Return kernel -> the variants of it that were launched."""
    found: dict[str, set[object]] = {}
    for each in launches:
        found.setdefault(each.kernel, set()).add(each.variant)
    return found
