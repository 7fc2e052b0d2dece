"""Routed experts on the CPU: few tokens by one call of compiled code, many by oneDNN's products."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from mooncake_kernels.native import build
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.onednn.experts import PackedExperts, by_expert

_TRIED_TOKENS = (1, 8, 32, 128, 512, 2048)
_TRIALS = 2
_LONG_TRIAL_S = 0.5
"""No larger number is tried after one that took so long: models are to start soon."""
_TRIED_CHOICES = 4

_OUTS, _PAIRS = 64, 16


def fits(hidden: int, inner: int) -> bool:
    """Return whether compiled code takes experts of these widths."""
    return hidden % _OUTS == 0 and inner % _OUTS == 0


def blocked(weight: torch.Tensor) -> torch.Tensor:
    """Return [..., outs, ins] in the order compiled code reads: [..., outs / 64, ins / 32, 16, 64,
    2], blocks of 64 outs with pairs of ins side by side.
    """
    *lead, outs, ins = weight.shape
    cut = weight.view(*lead, outs // _OUTS, _OUTS, ins // (2 * _PAIRS), _PAIRS, 2)
    return cut.transpose(-4, -3).transpose(-3, -2).contiguous()


class _Call:
    """One compiled function on the weights at `addresses`."""

    def __init__(self, name: str, addresses: list[int], num: int, hidden: int, inner: int) -> None:
        self.kind = name, num, hidden, inner
        self._function = getattr(build.code(), name)
        self._function.restype = None
        self._addresses = (ctypes.c_uint64 * len(addresses))(*addresses)
        self._num, self._hidden, self._inner = num, hidden, inner

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows, choices = experts.shape
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        assert (x.dtype, experts.dtype, weights.dtype) == (
            torch.bfloat16, torch.int64, torch.float32,
        )  # fmt: skip
        pairs = rows * choices
        out = torch.empty_like(x)
        room = torch.empty(pairs + rows * self._hidden, dtype=torch.float32)
        between = torch.empty(pairs, self._inner, dtype=x.dtype)
        self._function(
            *(ctypes.c_void_p(part.data_ptr()) for part in (x, experts, weights)),
            rows, choices, self._num, self._hidden, self._inner, self._addresses,
            ctypes.c_void_p(room.data_ptr()), ctypes.c_void_p(between.data_ptr()),
            ctypes.c_void_p(room.data_ptr() + 4 * pairs), ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, experts, weights) -> each token's sum; see `reference.experts.StackedExperts`"""


@dataclass(frozen=True)
class Timing:
    """How long one layer took both ways, the best of a few runs."""

    kind: str
    tokens: int
    few_s: float
    many_s: float


_measured: dict[tuple[str, int, int, int], list[Timing]] = {}


def timings() -> list[Timing]:
    """Return what was measured in this process to choose between the two ways."""
    return [timing for found in _measured.values() for timing in found]


def few_tokens(few: _Call, many: Experts) -> int:
    """Return up to how many tokens `few` is the faster way, measured once for each kind of layer.

    Above some number oneDNN's larger tiles (and AMX, where there is) multiply faster than the
    weights are read.
    """
    if few.kind not in _measured:
        _measured[few.kind] = _measure(few, many)
    limit = 0
    for timing in _measured[few.kind]:
        if timing.few_s > timing.many_s:
            break
        limit = timing.tokens
    return limit


def _measure(few: _Call, many: Experts) -> list[Timing]:
    """Time both ways on more and more tokens until `few` loses."""
    name, num, hidden, _ = few.kind
    generator = torch.Generator().manual_seed(0)
    found: list[Timing] = []
    for tokens in _TRIED_TOKENS:
        started = time.perf_counter()
        x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
        choices = min(num, _TRIED_CHOICES)
        chosen = torch.rand(tokens, num, generator=generator).topk(choices, dim=-1).indices
        weights = torch.ones(chosen.shape)
        best = [math.inf, math.inf]
        for _ in range(_TRIALS):
            for way in (0, 1):
                begin = time.perf_counter()
                (many if way else few)(x, chosen, weights)
                best[way] = min(best[way], time.perf_counter() - begin)
        found.append(Timing(name, tokens, *best))
        if best[0] > best[1] or time.perf_counter() - started > _LONG_TRIAL_S:
            break
    return found


class PackedBf16Experts:
    """As `reference.experts.StackedExperts`; bfloat16 only. One packed copy of the weights serves
    both ways.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Raises CannotBuild: compiled code cannot read what oneDNN packs here."""
        num, hidden, inner = down.shape
        if not fits(hidden, inner):
            raise build.CannotBuild(f"experts of widths {hidden} and {inner}, not multiples of 64")
        for weight in (gate_up[0], down[0]):
            # Which order oneDNN takes is its own business, and may be another on another CPU.
            if not torch.equal(onednn.bytes_of(onednn.pack(weight)), blocked(weight).flatten()):
                raise build.CannotBuild("oneDNN packs weights in another order on this CPU")
        self._many = PackedExperts(gate_up, down)
        addresses = [onednn.address(weight) for weight in self._many.packed]
        self._few = _Call("experts_bf16", addresses, num, hidden, inner)
        self._few_tokens = few_tokens(self._few, self._many)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see the reference."""
        few = 0 < x.shape[0] <= self._few_tokens
        return self._few(x, experts, weights) if few else self._many(x, experts, weights)


class Int4Experts:
    """As `reference.experts_quantized.Int4Experts`, x of bfloat16: weights stay INT4 in memory.

    Many tokens: each expert is widened to bfloat16 while it multiplies.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
    ) -> None:
        """Raises CannotBuild: compiled code cannot run here, or not on these widths."""
        num, hidden = down.shape[:2]
        inner = gate_up.shape[2]
        if not fits(hidden, inner):
            raise build.CannotBuild(f"experts of widths {hidden} and {inner}, not multiples of 64")
        self._kept = [
            kept
            for words, scales in (
                (gate_up.flatten(1, 2), gate_up_scales.flatten(1, 2)), (down, down_scales),
            )
            for kept in (_int4_blocks(words), _scale_blocks(scales))
        ]  # fmt: skip
        addresses = [kept.data_ptr() for kept in self._kept]
        self._few = _Call("experts_int4", addresses, num, hidden, inner)
        self._hidden, self._inner = hidden, inner
        self._few_tokens = few_tokens(self._few, self._many)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `experts.StackedExperts`."""
        few = 0 < x.shape[0] <= self._few_tokens
        return self._few(x, experts, weights) if few else self._many(x, experts, weights)

    def _many(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return by_expert(x, experts, weights, self._kept[0].shape[0], self._gate_up, self._down)

    def _gate_up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._wide(0, expert, 2 * self._inner))

    def _down(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._wide(2, expert, self._hidden))

    def _wide(self, which: int, expert: int, outs: int) -> torch.Tensor:
        """Return one expert's weight [outs, ins] in bfloat16."""
        codes, scales = self._kept[which][expert], self._kept[which + 1][expert]
        ins = codes.shape[1] * 2 * _PAIRS
        wide = torch.stack((codes & 15, codes >> 4), dim=-1).to(scales.dtype).sub_(8)
        wide *= scales[:, :, None, :, None]  # [outs / 64, groups, 16, 64, 2]
        return wide.permute(0, 3, 1, 2, 4).reshape(outs, ins)


def _int4_blocks(words: torch.Tensor) -> torch.Tensor:
    """Return words [experts, outs, ins / 8] as [experts, outs / 64, ins / 32, 16, 64] uint8."""
    experts, outs, _ = words.shape
    octets = words.contiguous().view(torch.uint8).view(experts, outs // _OUTS, _OUTS, -1, _PAIRS)
    return octets.permute(0, 1, 3, 4, 2).contiguous()


def _scale_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [experts, outs, ins / 32] as [experts, outs / 64, ins / 32, 64] bfloat16."""
    experts, outs, groups = scales.shape
    cut = scales.to(torch.bfloat16).view(experts, outs // _OUTS, _OUTS, groups)
    return cut.transpose(2, 3).contiguous()
