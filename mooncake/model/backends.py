"""Which implementation each op of the model uses. Flags request it; this module resolves it for the
device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from mooncake_kernels import dispatch, wide
from mooncake_kernels.dispatch import FIXED, NATIVE, ONEDNN, REFERENCE, TRITON, WIDE, kernel
from mooncake_kernels.native import build, packed
from mooncake_kernels.onednn import linear as onednn

from mooncake.base import ConfigError

AUTO = "auto"

_FIXED_ARGUMENTS: dict[str, dict[str, object]] = {
    # The size of a context's pieces when they may not depend on the batch: 4096 tokens with pages
    # of 64.
    "mla_absorbed": {"split_pages": 64},
    "mla_decode": {"split_pages": 64},
    "absorb_queries": {"fixed": True},
    "linear_heads": {"fixed": True},
}
"""The arguments of Triton's kernels when no result may depend on the batch."""
_FIXED_ROWS_OF_EXPERT = 32
"""The tiles for this load are used for every load when tiles may not depend on the batch."""


class SideStream(Protocol):
    """A second queue of a device, for work that does not depend on the work of the first."""

    def beside(self, work: Callable[[], torch.Tensor]) -> AbstractContextManager[torch.Tensor]:
        """Begin `work` after everything that the device has been given so far. It runs beside what
        the device is given inside the context; what it is given after the context waits for both.
        The tensor that `work` returns may be read after the context.
        """


@dataclass(frozen=True)
class Backends:
    """The resolved choice. `attention` covers norms, rotation and the KV write too.

    deterministic: no result of a row may depend on what else is in the batch, nor, by `FIXED` on
    the CPU, on how many ranks compute it. This costs speed: it needs fixed cuts and tiles, this
    project's own kernel for dense products, and prompts in the absorbed form. side: the second
    queue; None: the device does one thing after the other.
    """

    attention: str = REFERENCE
    moe: str = AUTO
    deterministic: bool = False
    side: SideStream | None = None

    def keeps(self, dtype: torch.dtype, *widths: int) -> bool:
        """Whether FP8 and INT4 weights of these widths stay quantized in memory. They do where our
        kernels multiply with them: Triton's on a GPU, compiled code with bfloat16 on the CPU.
        """
        if self.moe == TRITON:
            return True
        if dtype != torch.bfloat16 or self.moe not in (AUTO, NATIVE):
            return False
        return build.fits(*widths) and build.why_not() is None

    @property
    def compiled(self) -> bool:
        """Whether compiled code computes dense products of few rows."""
        return self.attention == NATIVE

    @property
    def adds_slabs(self) -> bool:
        """Whether sums that ranks share are made of slabs, so that one rank computes the
        same sums.
        """
        return self.moe == FIXED

    @property
    def fuses(self) -> bool:
        """Whether the work between a layer's products takes as few launches as possible: a sum
        together with the norm after it, the query's norm with the KV write, queries where attention
        reads them. The products of other backends add their result themselves.
        """
        return self.attention == TRITON

    def keeps_router(self, dtype: torch.dtype) -> bool:
        """Whether a router's weight stored as `dtype` is multiplied in that dtype, with its
        products summed in float32.
        """
        return self.moe == TRITON and not self.deterministic and dtype == torch.bfloat16

    @property
    def few_shapes(self) -> bool:
        """Whether oneDNN multiplies for attention. It builds code for each new shape."""
        return self.attention in (NATIVE, ONEDNN) and build.has_bf16()

    def op(self, name: str) -> Any:
        """Return an op of the attention side, or the reference when the backend has none."""
        backend = self.attention
        if backend in (NATIVE, ONEDNN) and not build.has_bf16():
            backend = WIDE if WIDE in dispatch.backends(name) else backend
        made = kernel(name, backend if backend in dispatch.backends(name) else REFERENCE)
        if self.attention == TRITON and self.deterministic and name in _FIXED_ARGUMENTS:
            return functools.partial(made, **_FIXED_ARGUMENTS[name])
        return made

    @property
    def route(self) -> Callable[..., Any]:
        if not self.deterministic:
            name = TRITON if self.moe == TRITON else REFERENCE
            if self.attention == NATIVE and self.moe != REFERENCE:
                name = NATIVE
            made: Callable[..., Any] = kernel("route", name)
            return made
        choose, multiply = kernel("choose", self.moe), kernel("linear", self.moe)
        return lambda x, weight, bias, routing: choose(multiply(x.float(), weight), bias, routing)

    @property
    def linear(self) -> Callable[..., torch.Tensor] | None:
        """Return the product that dense layers must use, or None for the fastest one."""
        return kernel("linear", self.attention) if self.deterministic else None

    def fp8_linear(
        self, weight: torch.Tensor, factors: torch.Tensor
    ) -> Callable[..., torch.Tensor]:
        """Return the product with an e4m3 weight [out, in] that has a factor for each 128 x 128
        block. It is called with x, and optionally with a tensor to add to.

        On a GPU, rows of x are quantized in groups of 128 columns, as in DeepSeek-V3 (arXiv
        2412.19437, 3.3).
        """
        if self.moe in (AUTO, NATIVE):
            return packed.Fp8Linear(weight, factors)
        multiply = kernel("linear_fp8", self.moe)
        if self.deterministic:
            multiply = functools.partial(multiply, fixed_tiles=True)
        return lambda x, to=None: multiply(x.contiguous(), weight, factors, to)

    def experts(self, op: str, *stored: torch.Tensor) -> tuple[Any, str]:
        """Return the layer of experts made of `stored`, and a description of its backend. The layer
        owns `stored` from then on.

        op: "experts", "…_fp8" or "…_int4".

        Raises:
            ConfigError: the requested backend cannot compute these.
        """
        name, why = self.moe, ""
        if name in (AUTO, NATIVE):
            try:
                made = kernel(op, NATIVE)(*stored)
                return made, f"{NATIVE}: {made.choice}"
            except build.CannotBuild as error:
                if name == NATIVE:
                    raise ConfigError(f"moe-backend=native: {error}") from error
                why = f", since there is no native code for them: {error}"
                name = ONEDNN if onednn.supported(stored[0]) else REFERENCE
        if name == ONEDNN and not onednn.supported(stored[0]):
            raise ConfigError(
                f"moe-backend=onednn: it computes bfloat16 on CPUs that have it, not "
                f"{stored[0].dtype} here; use auto or reference"
            )
        # They are packed anew in their own memory, because a second copy would fill a GPU's memory.
        in_place = {"in_place": True} if (op, name) == ("experts_int4", TRITON) else {}
        made = kernel(op, name)(*stored, **in_place)
        if in_place and made.num_bytes > (given := sum(part.nbytes for part in stored)):
            why = (
                f", its weights filled up to whole blocks of 128 rows and columns, which takes "
                f"{made.num_bytes / given:.1f} times their memory; fewer ranks leave less to fill"
            )
        if self.deterministic and name == TRITON:
            made.fix_tiles(_FIXED_ROWS_OF_EXPERT)
        return made, name + why


def settle(
    attention: str,
    moe: str,
    device: torch.device,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Backends:
    """Return the backends for `device`, with `auto` replaced. That is Triton on a GPU. On the CPU
    it is compiled code for bfloat16 when it can be built, else oneDNN's products of few shapes,
    else plain torch.

    Experts on the CPU stay `auto`: compiled code, oneDNN or the reference, whichever their dtype
    and widths allow.

    Raises:
        ConfigError: Triton is requested where it cannot run, or `deterministic` where no backend
            supports it.
    """
    on_gpu = device.type == "cuda"
    if deterministic and not on_gpu and (attention, moe) == (AUTO, AUTO):
        if reason := build.why_not():
            raise ConfigError(f"deterministic on the CPU needs compiled code: {reason}")
        return Backends(FIXED, FIXED, deterministic=True)
    compiled = not on_gpu and dtype == torch.bfloat16 and build.why_not() is None
    packs = not on_gpu and onednn.supported(torch.empty(0, dtype=dtype))
    if attention == AUTO and on_gpu:
        attention = TRITON
    elif attention == AUTO:
        plain = WIDE if wide.is_faster(dtype, device) else REFERENCE
        attention = NATIVE if compiled else ONEDNN if packs else plain
    chosen = Backends(
        attention=attention,
        moe=(TRITON if on_gpu else AUTO) if moe == AUTO else moe,
        deterministic=deterministic,
    )
    if TRITON in (chosen.attention, chosen.moe):
        _need_triton(device)
    if deterministic and (chosen.attention, chosen.moe) != (TRITON, TRITON):
        raise ConfigError(
            "deterministic needs attention-backend and moe-backend auto, or triton on a CUDA GPU: "
            "the libraries behind the other backends sum in an order that depends on the batch"
        )
    for flag, name in (("attention", chosen.attention), ("moe", chosen.moe)):
        if name == NATIVE and not compiled:
            reason = build.why_not() or f"it computes bfloat16 on the CPU, not {dtype} on {device}"
            raise ConfigError(f"{flag}-backend=native: {reason}")
        if name == ONEDNN and not packs:
            raise ConfigError(
                f"{flag}-backend=onednn: it computes bfloat16 on CPUs that have it, not {dtype} on "
                f"{device}; use auto or reference"
            )
    return chosen


def _need_triton(device: torch.device) -> None:
    try:
        interpreted = importlib.import_module("mooncake_kernels.triton.device").INTERPRETED
    except ImportError as error:
        raise ConfigError(f"the triton backend needs {error.name}: pip install triton") from error
    if device.type != "cuda" and not interpreted.value:
        raise ConfigError("the triton backend needs a CUDA GPU; use auto or reference here")
