"""Compiles every kernel that is launched for an H200, on a machine without a GPU; runs none.

Triton's own compiler and ptxas need no GPU. A stand-in driver names the target, launches are turned
into compilations, and what ptxas says of registers and shared memory is kept. To be used in a
process of its own with TRITON_INTERPRET unset.

Most of the time goes into what follows Triton's first intermediate form, and one release makes the
same of one form: a kernel whose form is known need not be compiled to the end.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import triton
from mooncake_kernels.triton.ahead import StandInDriver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

HOPPER_SHARED_BYTES = 232448


_PLACES = re.compile(r"^#loc.*\n|\s*loc\([^()]*(\([^()]*\)[^()]*)*\)", re.MULTILINE)
"""Lines of the source that stand in an intermediate form, and change nothing."""


class Known(Exception):
    """A kernel need not be compiled to the end; the argument is its digest."""


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: the digest of its first form, name, shared memory in bytes, warps, and
    its PTX.
    """

    digest: str
    name: str
    shared_bytes: int
    num_warps: int
    ptx: str
    cubin: bytes

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx


def digest_of(form: str, options: Any) -> str:
    """Return what tells a kernel's first form, and how it is compiled, from others."""
    return hashlib.sha256((_PLACES.sub("", form) + options.hash()).encode()).hexdigest()[:32]


@contextmanager
def compiling(known: Collection[str] = ()) -> Iterator[list[Compiled | str]]:
    """Yield a list to which every launch inside adds what it compiled, or the digest alone if that
    is `known`.
    """
    assert not triton.knobs.runtime.interpret
    compiled: list[Compiled | str] = []
    launch = JITFunction.run

    def look(*asked: Any) -> tuple[str, str]:
        """Triton calls this for a key of its cache, without arguments, and with all stages."""
        if asked:
            _, stages, options, *_ = asked
            name = next(iter(stages))
            stages[name] = partial(first_form, stages[name], options)
        return "digest", "digest"

    def first_form(make: Any, options: Any, source: Any, metadata: dict[str, Any]) -> Any:
        form = make(source, metadata)
        metadata["digest"] = digest_of(str(form), options)
        if metadata["digest"] in known:
            raise Known(metadata["digest"])
        return form

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        except Known as error:
            compiled.append(str(error))
            return None
        meta, made = kernel.metadata, kernel.asm
        compiled.append(
            Compiled(
                meta.digest, meta.name, meta.shared, meta.num_warps, made["ptx"], made["cubin"]
            )
        )
        return kernel

    driver.set_active(StandInDriver())
    JITFunction.run, triton.knobs.runtime.add_stages_inspection_hook = compile_only, look
    try:
        yield compiled
    finally:
        JITFunction.run, triton.knobs.runtime.add_stages_inspection_hook = launch, None
