"""Rotary angles of a model: plain, or YaRN as in DeepSeek-V3. Owns only the frequencies."""

from __future__ import annotations

import math

import torch

from mooncake.base import ModelSpec, YarnScaling, yarn_mscale
from mooncake.model.backends import Backends

_SINGULARITY = 0.001


class Rope:
    """Rotates the rope part of queries and keys, and keeps the order of the numbers."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, backends: Backends | None = None
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


def rope_frequencies(spec: ModelSpec) -> torch.Tensor:
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
