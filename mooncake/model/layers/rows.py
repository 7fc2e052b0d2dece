"""The layers that see one row at a time: token embedding, norm, rotary angles and vocabulary head.

Embedding and head share one weight when they are tied. Rotary angles are plain, or YaRN as in
DeepSeek-V3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from mooncake.base import YarnScaling, yarn_mscale
from mooncake.model.backends import Backends
from mooncake.model.layers.linear import Linear
from mooncake.model.parallel.group import Group, Solo


class Embedding:
    """Rows of a table. weight: [vocab, hidden], or one rank's columns when a `group` has all of
    them.
    """

    def __init__(self, weight: torch.Tensor, group: Group | None = None) -> None:
        self.weight = weight
        self._group = group or Solo()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] for `tokens` [rows] int64. Raises IndexError for an
        unknown token.
        """
        return self._group.gather(functional.embedding(tokens, self.weight))


class Head:
    """Logits over the vocabulary. weight: [vocab, hidden], or one rank's words of it when a `group`
    has all of them.

    A head tied to the embedding reads the embedding's own tensor, because packing would keep it
    twice.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        tied: bool,
        multiply: Callable[..., torch.Tensor] | None = None,
        group: Group | None = None,
        compiled: bool = False,
    ) -> None:
        """multiply, compiled: see `Linear`."""
        self._group = group or Solo()
        self._linear = None if tied else Linear(weight, multiply=multiply, compiled=compiled)
        self._tied_weight = weight if tied else None
        self._multiply = multiply or functional.linear

    def prepare(self, rows: int) -> None:
        """Let a library build its code for `rows` rows; see `layers.linear.Product`."""
        if self._linear is not None:
            self._linear.prepare(rows)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, vocab] float32 for `hidden` [rows, hidden], in `out` if it is given."""
        if self._linear is not None:
            sole = self._group.size == 1
            made = self._linear.wide(hidden) if sole else self._group.gather(self._linear(hidden))
        else:
            assert self._tied_weight is not None
            made = self._multiply(hidden, self._tied_weight)
        return made.float() if out is None else out.copy_(made)


class RmsNorm:
    """Root-mean-square norm over the last axis; weight: [width] in the model's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float, backends: Backends) -> None:
        self.weight = weight
        self.eps = eps
        self._rms_norm = backends.op("rms_norm")
        self._add_rms_norm = backends.op("add_rms_norm")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x normed, in its shape and dtype."""
        normed: torch.Tensor = self._rms_norm(x, self.weight, self.eps)
        return normed

    def of_sum(
        self, x: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (`x + update` normed, `x + update`), both [rows, width]. update: None adds
        nothing.
        """
        if update is None:
            return self(x), x
        normed, total = self._add_rms_norm(x, update, self.weight, self.eps)
        return normed, total


_SINGULARITY = 0.001


class RopeSpec(Protocol):
    """What says how far a rope turns: a `ModelSpec`, or the attention of a head that drafts."""

    @property
    def qk_rope_head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_interleave(self) -> bool: ...

    @property
    def yarn(self) -> YarnScaling | None: ...


class Rope:
    """Rotates the rope part of queries and keys, and keeps the order of the numbers."""

    def __init__(
        self, spec: RopeSpec, device: torch.device, backends: Backends | None = None
    ) -> None:
        self._interleaved = spec.rope_interleave
        self._frequencies = rope_frequencies(spec).to(device)
        self._scale = rope_scale(spec.yarn)
        self._rotate = (backends or Backends()).op("rotate")

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [rows, rope width / 2] complex64 for `positions` [rows] int64."""
        angles = positions.float()[:, None] * self._frequencies
        return torch.polar(torch.full_like(angles, self._scale), angles)

    def __call__(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return x [rows, heads, rope width] rotated, in its dtype."""
        rotated: torch.Tensor = self._rotate(x, rotation, self._interleaved)
        return rotated


def rope_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Return the angle that each pair turns per position, [rope width / 2] float32.

    With YaRN, fast pairs keep their frequency, slow ones turn `factor` times slower, and a ramp
    lies between them (arXiv 2309.00071 section 3.2, bounds truncated outwards as in DeepSeek-V3).
    """
    width, theta = spec.qk_rope_head_dim, spec.rope_theta
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if spec.yarn is None:
        return plain
    yarn = spec.yarn
    low = max(math.floor(_pair_with_turns(yarn.beta_fast, yarn, width, theta)), 0)
    high = min(math.ceil(_pair_with_turns(yarn.beta_slow, yarn, width, theta)), width - 1)
    span = high - low if high != low else _SINGULARITY
    pairs = torch.arange(width // 2, dtype=torch.float32)
    slow_part = ((pairs - low) / span).clamp(0, 1)
    return plain / yarn.factor * slow_part + plain * (1 - slow_part)


def rope_scale(yarn: YarnScaling | None) -> float:
    """Return the factor of cos and sin: the part of YaRN's temperature that the softmax scale
    leaves.

    It is `mscale / mscale_all_dim`, each as a term of the factor, or the plain term when either is
    not given.
    """
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def _pair_with_turns(turns: float, yarn: YarnScaling, width: int, theta: float) -> float:
    """Return the (fractional) pair that makes `turns` full turns over the original context."""
    wavelength = yarn.original_max_position / (turns * 2 * math.pi)
    return width * math.log(wavelength) / (2 * math.log(theta))
